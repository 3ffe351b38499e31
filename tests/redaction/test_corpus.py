"""Every credential in a log or an error is taken out, and what people need to read stays."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tiercheck.redaction import GONE, redacted

# Put together here, so that no scanner takes them for leaked ones.
WORD = "hunter2-" + "0f9a"
HEX = "0f9a4c21" * 5
OPAQUE = "Zq7Xw2" * 7
JWT = "ey" + "JhbGciOiJSUzI1NiJ9" + ".ey" + "JzdWIiOiJzeXN0ZW0ifQ." + OPAQUE
PHRASE = "correct horse battery staple"
BEGIN, END = "-----BEGIN {}PRIVATE KEY-----", "-----END {}PRIVATE KEY-----"
LETTERS = "opensesame"
ODD = "p@s,s(w0)rd#1"
MIXED = re.sub("[+/=]", "", base64.b64encode(hashlib.shake_256(b"not a secret").digest(400)).decode())[:200]
"""Letters and digits as by chance."""
PEM = "\n".join([BEGIN.format(""), *textwrap.wrap(MIXED, 64), END.format("")])
BASIC = base64.b64encode(f"bob:{WORD}".encode()).decode()
DOCKER = json.dumps({"auths": {"registry.example": {"auth": BASIC}}})
RED, OFF = "\x1b[1;31m", "\x1b[0m"

SECRETS: list[tuple[str, str]] = [
    (f"Authorization: Token {HEX}", HEX),
    (f'Authorization: Digest username="bob", realm="x", response="{HEX}"', HEX),
    (f"Authorization: Basic {WORD}==", WORD),
    (f"authorization: Bearer {WORD}", WORD),
    (f"curl -H 'Authorization: Bearer {WORD}' https://a.example", WORD),
    (f'curl -H "Authorization: Api-Key a b {WORD}" https://a.example', WORD),
    (f"Proxy-Authorization: Negotiate {OPAQUE}", OPAQUE),
    (f"{{'Authorization': 'Bearer {WORD}', 'Host': 'x'}}", WORD),
    (f"[('Authorization', 'Bearer {WORD}'), ('Host', 'x')]", WORD),
    (f"sending bearer {OPAQUE} to the server", OPAQUE),
    (f"AWS4-HMAC-SHA256 Credential={WORD}/20260101/x, SignedHeaders=host, Signature={HEX}", HEX),
    (f'{{"password": "{PHRASE}"}}', "horse"),
    (f'{{"password": "with \\"quotes\\" {WORD}", "x": 1}}', WORD),
    (f'{{\\"password\\": \\"{PHRASE}\\", \\"x\\": 1}}', "horse"),
    (f"{{'db': {{'password': '{PHRASE}'}}}}", "horse"),
    (f'"passwords": ["{WORD}", "{WORD}1"]', WORD),
    (f"password: {PHRASE}", "horse"),
    (f"db_password: {WORD}", WORD),
    (f"  - password: {PHRASE}", "horse"),
    (f"password: '{PHRASE}'", "horse"),
    (f'{{"auths": {{"registry.example": {{"auth": "{OPAQUE[:12]}"}}}}}}', OPAQUE[:12]),
    (f"client-key-data: {OPAQUE[:20]}", OPAQUE[:20]),
    (f"MYSQL_PWD={WORD}", WORD),
    (f'PASSWORD="two {WORD}"', WORD),
    (f"WANDB_API_KEY={HEX}", HEX),
    (f"setting WANDB_API_KEY to '{WORD}', WANDB_API_KEY='{WORD}'", f"='{WORD}"),
    (f"wandb login {HEX}", HEX),
    ("using sk-" + "proj-" + OPAQUE, OPAQUE),
    ("using sk-" + "ant-api03-" + OPAQUE, OPAQUE),
    ("\\nsk-" + OPAQUE, OPAQUE),
    ("cloning with glp" + f"at-{HEX[:20]}", HEX[:20]),
    ("publishing with npm" + f"_{HEX[:36]}", HEX[:36]),
    ("pulling with gh" + f"p_{HEX[:36]}", HEX[:36]),
    ("pulling with github" + f"_pat_{HEX[:36]}", HEX[:36]),
    ("posting with xox" + f"b-{HEX}", HEX),
    ("loading with hf" + f"_{HEX[:34]}", HEX[:34]),
    ("key id AK" + "IAIOSFODNN7ABCDEFGH", "IOSFODNN7"),
    ("key id AS" + "IAIOSFODNN7ABCDEFGH", "IOSFODNN7"),
    (f"{{'aws_secret_access_key': '{OPAQUE}'}}", OPAQUE),
    (f"aws_secret_access_key = {OPAQUE}", OPAQUE),
    (f"AWS_SESSION_TOKEN={OPAQUE}//////////==", OPAQUE),
    (f"AccountName=a;AccountKey={OPAQUE}==;EndpointSuffix=core.windows.net", OPAQUE),
    (f"SharedAccessKeyName=n;SharedAccessKey={OPAQUE}=", OPAQUE),
    (f"Cookie: session={WORD}; theme=dark", WORD),
    (f"Set-Cookie: sid={WORD}; Path=/", WORD),
    (f"X-Auth-Token: {WORD}", WORD),
    (f"x-api-key: {WORD}", WORD),
    (f"X-Vault-Token: {WORD}", WORD),
    (f"X-Amz-Security-Token:{WORD}", WORD),
    (f"python train.py --wandb-key {WORD}", WORD),
    (f"python train.py --hf-token={WORD} --lr 3", WORD),
    ("python train.py --password letters --lr 3", "letters"),
    (f"python train.py --password '{PHRASE}' --lr 3", "horse"),
    (f"https://bob:{WORD}@store.example.com/x", WORD),
    (f"https://{WORD}@store.example.com/x", WORD),
    ("postgres://bob:with/slash@db:5432/x", "with/slash"),
    (f"redis://:{WORD}@cache:6379", WORD),
    (f"GET /b/o?X-Amz-Signature={WORD}&x=1", WORD),
    (f"GET /b/o?a=1&X-Amz-Security-Token={WORD}", WORD),
    (f"https://a.blob.core.windows.net/c?sv=2020&sig={WORD}", WORD),
    (f"https://a.example/x?key={WORD}", WORD),
    (f"{BEGIN.format('RSA ')}\n{WORD}\n{END.format('RSA ')}", WORD),
    (f"{BEGIN.format('')}\\n{WORD}\\n{END.format('')}", WORD),
    (f"{BEGIN.format('OPENSSH ')}\n{OPAQUE}\n{OPAQUE}\n", OPAQUE),
    (f"cut off: {BEGIN.format('EC ')}{OPAQUE}", OPAQUE),
    (f"got {JWT} as an answer", OPAQUE),
    (f"/var/run/secrets/kubernetes.io/serviceaccount/token: {JWT}", OPAQUE),
    ("vault gave hvs" + f".{HEX}", HEX),
    (f"- name: WANDB_API_KEY\n  value: {WORD}", WORD),
    (f'{{"name": "WANDB_API_KEY", "value": "{WORD}"}}', WORD),
    (f"os.environ['WANDB_API_KEY'] = '{WORD}'", WORD),
    (f"token = {WORD} # of the team", WORD),
    (f"client_secret: {WORD}", WORD),
    (f"clientSecret={WORD}", WORD),
    (f"host=db user=bob password={WORD} port=5432", WORD),
    (f"Server=db;User Id=bob;Pwd={WORD};", WORD),
    (f"password: Forbidden {WORD}", WORD),
    (f"token: 'validation errors {WORD}'", WORD),
    (f"secret key: {WORD}", WORD),
    (f"secrets={WORD}", WORD),
    (f'data.token: Duplicate value: "{WORD}"', WORD),
    (f"auth_token => {WORD}", WORD),
    ("<password>" + WORD + "</password>", WORD),
    (f"token -> {WORD}", WORD),
    (f"token: “{WORD}”", WORD),
    (f"args: [--token, {WORD}]", WORD),
    (f"creds={WORD}", WORD),
    ("dckr" + f"_pat_{HEX[:27]}", HEX[:27]),
    ("AI" + f"za{OPAQUE[:35]}", OPAQUE[:35]),
    ("ya29" + f".{OPAQUE}", OPAQUE),
    ("pypi" + f"-{OPAQUE}", OPAQUE),
    ("nvapi" + f"-{HEX}", HEX),
    # clouds and stores
    (f"Credentials(access_key='AK', secret_key='{LETTERS}', token=None)", LETTERS),
    (f'"SecretAccessKey": "x", "SessionToken": "{MIXED}"', MIXED),
    (f"<SecretAccessKey>{MIXED[:40]}</SecretAccessKey>", MIXED[:40]),
    (f"https://b.s3.amazonaws.com/o?AWSAccessKeyId=x&Signature={quote(WORD + '=', safe='')}&Expires=1", WORD),
    (f"?X-Goog-Signature={HEX}", HEX),
    (json.dumps({"type": "service_account", "private_key_id": "0f9a", "private_key": PEM}), MIXED[:60]),
    (json.dumps(json.dumps({"sa": json.dumps({"private_key": PEM})})), MIXED[:60]),
    (f"BlobEndpoint=https://a.example/;SharedAccessSignature=sv=2022&sig={WORD}", WORD),
    (f"export AZURE_STORAGE_KEY={OPAQUE}==", OPAQUE),
    # tools of training
    (f"wandb.login(key='{HEX}')", HEX),
    (f"wandb login --relogin --host https://w.example {HEX} && python t.py", HEX),
    (f"mlflow.set_tracking_uri('https://bob:{LETTERS}@m.example')", LETTERS),
    (f"MLFLOW_TRACKING_PASSWORD={LETTERS}", LETTERS),
    (f"comet_ml.Experiment(api_key='{HEX}')", HEX),
    (f"git clone https://oauth2:{LETTERS}@git.example/x.git", LETTERS),
    (f"HTTPS_PROXY=http://bob:{LETTERS}@proxy:3128", LETTERS),
    (f"psql 'host=db user=bob password={ODD}'", ODD),
    (f"psql postgresql://bob:{ODD}@db/x", "w0)rd"),
    (f"amqps://bob:{quote(ODD)}@mq:5671/v", quote(ODD)),
    (f"//registry.example/:_authToken={LETTERS}", LETTERS),
    (f"helm install x . --set db.password={LETTERS},replicas=3", LETTERS),
    (f"-Djavax.net.ssl.keyStorePassword={LETTERS}", LETTERS),
    # files and objects
    (DOCKER, BASIC),
    (DOCKER.replace('"', '\\"'), BASIC),
    (f"users:\n- name: bob\n  user:\n    token: {LETTERS}", LETTERS),
    (f"  DB_PASS: {LETTERS}", LETTERS),
    (f'"Env": ["DB_PASS={LETTERS}", "A=b"]', LETTERS),
    (f"Pod env: [{{Name:DB_PASSWORD Value:{LETTERS} ValueFrom:nil}}]", LETTERS),
    (f'&v1.EnvVar{{Name:"HF_TOKEN", Value:"{LETTERS}"}}', LETTERS),
    (f"map[password:{LETTERS} user:bob]", LETTERS),
    (f'map[string][]byte{{"password": []byte("{LETTERS}")}}', LETTERS),
    (f'<add key="Password" value="{LETTERS}"/>', LETTERS),
    # Python
    (f"Config(user='bob', password='{LETTERS}', port=1)", LETTERS),
    (f"password=SecretStr('{LETTERS}')", LETTERS),
    (f"  self.password: str = '{LETTERS}'", LETTERS),
    (f"{{'password': ['{LETTERS}', '{WORD}']}}", WORD),
    (f"environ({{'HF_TOKEN': '{LETTERS}', 'HOME': '/root'}})", LETTERS),
    (f"assert password == '{LETTERS}'", LETTERS),
    (json.dumps({"m": json.dumps({"m": json.dumps({"password": LETTERS})})}), LETTERS),
    # HTTP
    (f"header: ['Basic {BASIC}']", BASIC),
    (f"send: b'GET / HTTP/1.1\\r\\nAuthorization: Basic {BASIC}\\r\\nAccept: */*\\r\\n'", BASIC),
    (f"GET /x?access_token={LETTERS}&y=1 HTTP/1.1", LETTERS),
    (f"GET /cb?code={HEX}&state=1", HEX),
    # colours, and what writers of logs put before lines
    (f"{RED}password{OFF}={LETTERS}", LETTERS),
    (f"password={RED}{LETTERS[:4]}{OFF}{LETTERS[4:]}", LETTERS[4:]),
    (f"gh{RED}p_{OFF}{MIXED[:36]}", MIXED[:36]),
    (f"progress 10%\rpassword={LETTERS}\rprogress 20%", LETTERS),
    ("\n".join(f"[rank0]: {line}" for line in PEM.split("\n")), MIXED[70:120]),
]

NOT_FOUND = [
    f"{WORD} is the password",
    f"password\t{WORD}",
    f"machine a.example login bob password {WORD}",
    f"kind: Secret\ndata:\n  whatever: {BASIC}",
    f"next line:\n{WORD}",
    f"curl -u bob:{WORD} https://a.example",
    f"auth=('bob', '{WORD}')",
    f"[('password', '{WORD}')]",
    f"Kennwort: {WORD}",
    f"%22password%22%3A%22{WORD}%22",
    f"the signature was made with {OPAQUE[:40]}",
    f"https://hooks.slack.com/services/T0/B0/{MIXED[:24]}",
]
"""What docs/operate/security.md says is not found."""

HARMLESS = [
    "2026-11-21T12:00:00Z worker 3: step 12480, loss 2.31, 1.91 s",
    "attempt 5: step 12214: newest version that every rank can rebuild; 56 ranks from own memory, 8 from "
    "a peer",
    "https://minio.storage.svc:9000/checkpoints/team-a/gpt-large: 503 Slow Down",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "image "
    "registry.example.com:5000/team/train@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "docker://registry.example.com:5000/team/train@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "pod 4f9c2a61-0b1d-4c53-9a55-7be1cf8dbb10 on node gpu-a-17.example.internal",
    "commit 0f9a4c210f9a4c210f9a4c210f9a4c210f9a4c21",
    "tokens: 4096, tokens/s=31250.5, num_tokens=1048576, max_new_tokens: 512",
    "tokens_per_second=31250 tokens_seen: 1.5e9",
    "TOKENIZERS_PARALLELISM=false",
    "tokenizer: gpt2, vocabulary 50257",
    "pad_token_id=50256 eos_token: 50256",
    'secret "train/job-credentials" not found',
    'MountVolume.SetUp failed for volume "credentials" : secret "my-s3" not found',
    'secrets is forbidden: User "system:serviceaccount:a:b" cannot get resource "secrets" in API group ""',
    "name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in credentialsSecretName, or give "
    "the pods a cloud identity.",
    "refused the credentials (SignatureDoesNotMatch); correct the Secret named in credentialsSecretName.",
    "s3://bucket/team refused the credentials (InvalidAccessKeyId); correct the Secret named in "
    "credentialsSecretName.",
    "credentialsSecretName: my-s3-secret",
    "automountServiceAccountToken: false",
    "serviceAccountName: default",
    "secretKeyRef: {name: s3, key: AWS_SECRET_ACCESS_KEY}",
    "--token is required",
    "the password is wrong",
    "the token has expired",
    "basic authentication is off",
    "credentials:\n  secretName: my-s3\n  user: bob",
    "forward pass: 1.2 s, backward pass: 2.1 s",
    "PWD=/workspace/examples",
    "PASSWORD=$DB_PASSWORD",
    "password: null",
    "KeyError: 'model.layers.0.attention.weight'",
    "topologyKey: topology.kubernetes.io/zone",
    "key: node.kubernetes.io/unreachable",
    "artifact train/job/artifacts/100-1/rank-00003 was read in 1.2 s",
    "/usr/local/lib/python3.12/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:123",
    "Llama-3_1-8B-Instruct-FSDP2-AdamW8bit-SeqLen4096",
    "docker run -u 65532:65532 image",
    "-----BEGIN CERTIFICATE-----",
    "session 12 of the exchange with worker 3 ended",
    "git+https://git.example.com/team/repo@main",
    "authorization failed for the user",
    "cookiecutter and secretary are words",
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 88, in main',
    "    token_ids = tokenizer(text)['input_ids']",
    "    self.key = nn.Linear(768, 768)",
    'Unexpected key(s) in state_dict: "module.layers.11.attention.key.weight".',
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity)",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: exitcode : -9 (pid: 4242)",
    "step 12480 | loss 2.3145 | lr 3.0e-04 | tokens/s 31250 | mfu 0.41",
    "consumed tokens: 1,048,576 of 300B",
    "the next token is 'the', its probability 0.31",
    "bos_token='<s>', eos_token='</s>', pad_token='<pad>'",
    "failed to authorize: failed to fetch anonymous token: unexpected status: 401 Unauthorized",
    "s3://checkpoints/team-a/gpt-large/attempt-5/step-00012214/rank-00003/shard-00000-of-00056.safetensors",
    'md5: 0f9a4c210f9a4c210f9a4c210f9a4c21, etag: "0f9a4c210f9a4c210f9a4c210f9a4c21-17"',
    "password: must not be empty",
    "spec.token: Invalid value: must be a string",
    "spec.volumes[0].projected.sources[0].serviceAccountToken: Forbidden: may not be used",
    "secret: Too long: may not be more than 1048576 bytes",
    "data.token: Internal error: unable to parse",
    'status.token: Not found: "x"',
    "exceeded quota: team, requested: secrets=1, used: secrets=20, limited: count/secrets=20",
    'failed to fetch token: serviceaccounts "trainer" is forbidden: node requested token not bound to a pod',
    'failed to fetch token: Post "https://10.0.0.1:443/api/v1/x": dial tcp: i/o timeout',
    "error retrieving the registry's token: Unauthorized",
    "references non-existent secret key: wandb-key",
    "validate-automountServiceAccountToken: 'validation error: Auto-mounting is not allowed. rule x'",
    "missing required field: password",
    "Secret my-s3 has no key AWS_SECRET_ACCESS_KEY",
    "tokenExpirationSeconds: 3600",
    "the test passed: 12 of 12",
    "signature of forward(): (self, x, mask=None)",
    "keys: ['a', 'b', 'c']",
    "author: Bob, authority: none",
    "seed: 1234",
    "hook registered at https://hooks.example.com/ready",
    "http://10.0.0.7:8472/metrics: connection refused",
    "NCCL_SOCKET_IFNAME=eth0 MASTER_ADDR=10.0.0.7 MASTER_PORT=29500 WORLD_SIZE=64",
    "args: ['python', 'train.py', '--lr', '3e-4', '--max-tokens', '4096', '--key-dim', '64']",
    "AccessDenied: User: arn:aws:iam::123456789012:role/train is not authorized to perform: s3:PutObject",
    "bearer tokens are checked by the API server",
    "mkdir -p /var/lib/tiercheck && cp -a /a /b",
    "10%\r20%\r30%",
    "Setting `pad_token_id` to `eos_token_id`:50256 for open-end generation.",
    "UserWarning: `use_auth_token` is deprecated and will be removed; use `token` instead.",
    "error: couldn't find key HF_TOKEN in Secret train/hf",
    "envFrom: [{secretRef: {name: my-s3}}]",
    '{"secret":{"secretName":"my-s3"}}',
    "An error occurred (ExpiredToken) when calling the GetObject operation: The provided token has expired.",
    "key 'team-a/gpt-large/step-00012214' does not exist",
    '{"level":"info","ts":1732190400.123,"msg":"step","step":12480,"tokens":1048576,"key":"loss"}',
    "Namespace(lr=0.0003, seed=1, tokens=4096, key_dim=64, passes=2)",
    "libtorch_cuda.so(_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEE+0x1b2)",
    "A100-SXM4-80GB-MIG-1g.10gb: GPU-4f9c2a61-0b1d-4c53-9a55-7be1cf8dbb10",
    "https://github.com/pytorch/pytorch/issues/123456#issuecomment-1234567890",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_credentials_are_taken_out(text: str, secret: str) -> None:
    assert secret in text
    once = redacted(text)
    assert secret not in once
    assert GONE in once
    assert redacted(once) == once


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_credentials_are_taken_out_of_the_middle_of_a_log(text: str, secret: str) -> None:
    shown = redacted(f"2026-11-21 12:00:00,123 WARNING train: trouble\n{text}\nand on it went")
    assert secret not in shown
    assert shown.startswith("2026-11-21 12:00:00,123 WARNING train: trouble\n")
    assert shown.endswith("\nand on it went")


@pytest.mark.parametrize("line", HARMLESS)
def test_what_people_need_to_read_stays(line: str) -> None:
    assert redacted(line) == line


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_the_docs_say_is_not_found_stays(text: str) -> None:
    assert redacted(text) == text


# Sentences of our own


ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("operator", "sidecar", "tiercheck")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "redaction.py"
]
SHOWS_A_SETTING = "TIERCHECK_WEBHOOK_SECRET=NAMESPACE/NAME"


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string with a blank in it; `x7` stands for what is filled in."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x7" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value
        if " " in text and SHOWS_A_SETTING not in text:
            yield node.lineno, text


@pytest.mark.parametrize("folder", ["operator", "sidecar", "tiercheck"])
def test_sentences_of_ours_stay_as_they_are(folder: str) -> None:
    said = [
        (path, line, text)
        for path in FILES
        if path.is_relative_to(ROOT / folder)
        for line, text in sentences(path)
    ]
    assert len(said) > 300
    changed = [
        (str(path.relative_to(ROOT)), line, redacted(text))
        for path, line, text in said
        if redacted(text) != text
    ]
    assert changed == [], "say it in other words"
