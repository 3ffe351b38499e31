"""Serves a Kubernetes API that starts at once, so that tests and the demo need no cluster.

It keeps everything in memory and serves a subset of the API. What it serves behaves as the real server does;
the suite in tests/local/apiserver runs on both and checks that. Left out on purpose: server-side apply and
managedFields, strategic patches of lists, deletion in the foreground, protobuf and YAML, metadata-only
answers, unknown fields of built-in kinds (kept, where the real server drops them), aggregated discovery,
authorization (one token allows everything, on 127.0.0.1 only), Pod logs and exec; of CRDs allOf, oneOf, not,
multipleOf, exclusive bounds, selectable fields, and the reasons of rules. As on the real server, work that
belongs to controllers is not done here: scheduling, node life-cycle, garbage collection, emptying namespaces,
the status of disruption budgets.
"""
