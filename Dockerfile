# The images of TierCheck, one target each. `make images` builds the three with docker, podman or buildah:
#
#   make images REGISTRY=registry.example.com/me      # and `make images-push REGISTRY=registry.example.com/me`
#
# All run as user 65532 and write nowhere but into mounted volumes, so they work with a read-only root file system
# and under the restricted Pod Security Standard. Operator and sidecar contain no torch; your training image needs
# nothing of ours, because the sidecar's image carries the library and copies it into a volume.
#
# For a build that can be repeated bit by bit, give the base by digest:
#   --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:...
# `make setup` takes this Python for the tests as well, where the machine has it.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# The official base has no bytecode of the standard library, and our processes may write none: each start would compile it.
FROM ${PYTHON_IMAGE} AS bytecode
RUN lib=$(python3 -c 'import os; print(os.path.dirname(os.__file__))') && mkdir /bytecode && touch /before \
 && python3 -m compileall -q -j 0 -x 'site-packages|dist-packages|lib2to3|idlelib|/tests?/' "$lib" \
 && find "$lib" -name '*.pyc' -newer /before -exec cp --parents -t /bytecode {} +

# What all three have in common. Nothing runs in it, so that it holds nothing of the machine that builds it.
FROM ${PYTHON_IMAGE} AS python
COPY --from=bytecode /bytecode /

# An environment of its own for what builds, as the Python of a distribution lets pip install nothing beside it. What is installed
# is split from what is ours, so that a change of ours does not install everything again.
FROM ${PYTHON_IMAGE} AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN python3 -m venv /build && /build/bin/python3 -m pip install --constraint constraints.txt hatchling \
 && python3 -m venv --without-pip /opt/tiercheck \
 && for part in operator sidecar; do \
      python3 -c 'import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' \
        $part <pyproject.toml >/$part.txt; \
    done

FROM tools AS builder
COPY README.md LICENSE ./
COPY docs/operate/troubleshooting.md docs/operate/troubleshooting.md
COPY tiercheck tiercheck
COPY operator operator
COPY sidecar sidecar
COPY cli cli
COPY local local
RUN /build/bin/python3 -m hatchling build -t wheel -d /wheel

FROM tools AS operator-packages
RUN /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt --requirement /operator.txt
COPY --from=builder /wheel /wheel
RUN /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt --no-deps /wheel/*.whl

FROM tools AS sidecar-packages
RUN /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt --requirement /sidecar.txt
COPY --from=builder /wheel /wheel
RUN /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt --no-deps /wheel/*.whl

# The default wheel of torch for Linux brings gigabytes of CUDA. For a CPU image, give PyTorch's own index of CPU wheels:
#   --build-arg TORCH_INDEX=<URL of that index>
FROM tools AS trainer-packages
ARG TORCH_INDEX=""
RUN /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch \
 && /build/bin/python3 -m pip --python /opt/tiercheck/bin/python3 install --constraint constraints.txt torch numpy

FROM python AS operator
LABEL org.opencontainers.image.title="TierCheck operator" org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/tiercheck/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=operator-packages /opt/tiercheck /opt/tiercheck
USER 65532:65532
WORKDIR /
ENTRYPOINT ["python3", "-m", "tiercheck_operator"]

# The same image serves as init container: `python3 -m tiercheck_sidecar.install_library DEST`.
FROM python AS sidecar
LABEL org.opencontainers.image.title="TierCheck sidecar" org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/tiercheck/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=sidecar-packages /opt/tiercheck /opt/tiercheck
USER 65532:65532
WORKDIR /
ENTRYPOINT ["python3", "-m", "tiercheck_sidecar"]

# HOME and LOGNAME because torch asks who it is, and user 65532 has no entry in /etc/passwd. Mount a volume at /tmp if
# your script compiles or caches.
FROM python AS example-trainer
LABEL org.opencontainers.image.title="TierCheck example trainer" org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/tiercheck/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp LOGNAME=trainer
COPY --from=trainer-packages /opt/tiercheck /opt/tiercheck
COPY examples/train_gpt.py /workspace/train_gpt.py
USER 65532:65532
WORKDIR /workspace
# As PID 1 the script would not end by SIGTERM. Under the operator the launcher is PID 1, and this is not used.
ENTRYPOINT ["sh", "-c", "trap 'exit 143' TERM; trap 'exit 130' INT; python3 /workspace/train_gpt.py \"$@\" & wait $!", "sh"]
