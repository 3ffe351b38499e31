"""Every credential in a log or an error is taken out, and what people need to read stays."""

from __future__ import annotations

import pytest

from tiercheck.redaction import GONE, redacted

# Put together here, so that no scanner takes them for leaked ones.
WORD = "hunter2-" + "0f9a"
HEX = "0f9a4c21" * 5
OPAQUE = "Zq7Xw2" * 7
JWT = "ey" + "JhbGciOiJSUzI1NiJ9" + ".ey" + "JzdWIiOiJzeXN0ZW0ifQ." + OPAQUE
PHRASE = "correct horse battery staple"
BEGIN, END = "-----BEGIN {}PRIVATE KEY-----", "-----END {}PRIVATE KEY-----"

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
    (f"(b'authorization', b'{WORD}')", WORD),
    (f"sending bearer {OPAQUE} to the server", OPAQUE),
    (f"AWS4-HMAC-SHA256 Credential={WORD}/20260101/x, SignedHeaders=host, Signature={HEX}", HEX),
    (f'{{"password": "{PHRASE}"}}', "horse"),
    (f'{{"password": "with \\"quotes\\" {WORD}", "x": 1}}', WORD),
    (f'{{\\"password\\": \\"{PHRASE}\\", \\"x\\": 1}}', "horse"),
    (f"{{'db': {{'password': '{PHRASE}'}}}}", "horse"),
    (f'"passwords": ["{WORD}", "{WORD}1"]', WORD),
    (f"password: {PHRASE}", "horse"),
    (f"  - password: {PHRASE}", "horse"),
    (f"password: '{PHRASE}'", "horse"),
    (f"password: |\n  first\n  {WORD}\nnext: 1", WORD),
    (f"password:\n    {PHRASE}\nnext: 1", "horse"),
    (f'"password":\n    "{PHRASE}",', "horse"),
    (f'{{"auths": {{"registry.example": {{"auth": "{OPAQUE[:12]}"}}}}}}', OPAQUE[:12]),
    (f"client-key-data: {OPAQUE[:20]}", OPAQUE[:20]),
    (f"user=bob;pass={WORD};x=1", WORD),
    (f"MYSQL_PWD={WORD}", WORD),
    (f"secret: >-\n    {PHRASE}\nnext: 1", "horse"),
    (f'PASSWORD="two {WORD}"', WORD),
    (f"PASSWORD=two {WORD}", WORD),
    (f"connecting with user bob password: {PHRASE}", "horse"),
    (f"export WANDB_API_KEY {HEX}", HEX),
    (f"WANDB_API_KEY={HEX}", HEX),
    (f"ENV HF_TOKEN {WORD}", WORD),
    (f"setting WANDB_API_KEY to '{WORD}', WANDB_API_KEY='{WORD}'", f"='{WORD}"),
    (f"wandb login {HEX}", HEX),
    (f"wandb login --relogin --host https://w.example {HEX} && python t.py", HEX),
    (f"docker login -u bob -p {WORD} registry.example", WORD),
    (f"sshpass -p {WORD} ssh host", WORD),
    (f"curl -u bob:{WORD} https://a.example", WORD),
    (f"curl --user 'bob:{WORD}' https://a.example", WORD),
    ("using sk-" + "proj-" + OPAQUE, OPAQUE),
    ("using sk-" + "ant-api03-" + OPAQUE, OPAQUE),
    ("\\nsk-" + OPAQUE, OPAQUE),
    ("cloning with glp" + f"at-{HEX[:20]}", HEX[:20]),
    ("publishing with npm" + f"_{HEX[:36]}", HEX[:36]),
    ("pulling with gh" + f"p_{HEX[:36]}", HEX[:36]),
    ("pulling with github" + f"_pat_{HEX[:36]}", HEX[:36]),
    ("posting with xox" + f"b-{HEX}", HEX),
    ("loading with hf" + f"_{HEX[:34]}", HEX[:34]),
    ("https://hooks.slack" + f".com/services/T0/B0/{HEX}", HEX),
    ("key id AK" + "IAIOSFODNN7ABCDEFGH", "IOSFODNN7"),
    ("key id AS" + "IAIOSFODNN7ABCDEFGH", "IOSFODNN7"),
    (f"{{'aws_secret_access_key': '{OPAQUE}'}}", OPAQUE),
    (f"aws_secret_access_key = {OPAQUE}", OPAQUE),
    (f"AWS_SESSION_TOKEN={OPAQUE}//////////==", OPAQUE),
    (f"the signature was made with {OPAQUE[:40]}", OPAQUE[:40]),
    (f"AccountName=a;AccountKey={OPAQUE}==;EndpointSuffix=core.windows.net", OPAQUE),
    (f"SharedAccessKeyName=n;SharedAccessKey={OPAQUE}=", OPAQUE),
    (f"machine api.wandb.ai login user password {WORD}", WORD),
    ("machine api.wandb.ai login user password lettersonly", "lettersonly"),
    (f"Cookie: session={WORD}; theme=dark", WORD),
    (f"Set-Cookie: sid={WORD}; Path=/", WORD),
    (f"'X-Auth': '{WORD}'", WORD),
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
    (f"postgres://bob:with/slash@{WORD}@db:5432/x", WORD),
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
    ("vault gave s" + f".{OPAQUE[:24]}", OPAQUE[:24]),
    (f"Invalid header value b'{WORD}\\n'", WORD),
    (f"Header part ('{WORD}\\n') from ('X', '{WORD}') must be str", WORD),
    (f"Illegal header value {WORD!r}", WORD),
    (f"- name: WANDB_API_KEY\n  value: {WORD}", WORD),
    (f'{{"name": "WANDB_API_KEY", "value": "{WORD}"}}', WORD),
    (f"os.environ['WANDB_API_KEY'] = '{WORD}'", WORD),
    (f"token = {WORD} # of the team", WORD),
    (f"client_secret: {WORD}", WORD),
    (f"clientSecret={WORD}", WORD),
    (f"the password is {WORD}", WORD),
    (f"host=db user=bob password={WORD} port=5432", WORD),
    (f"Server=db;User Id=bob;Pwd={WORD};", WORD),
    (f"auth_token => {WORD}", WORD),
    ("<password>" + WORD + "</password>", WORD),
    (f"| token | {WORD} |", WORD),
    (f"token -> {WORD}", WORD),
    (f"Incorrect API key provided: {WORD}", WORD),
    (f"Password for user bob: {WORD}", WORD),
    (f"The AWS Access Key Id '{WORD}' you provided does not exist", WORD),
    (f"&quot;password&quot;:&quot;{WORD}&quot;", WORD),
    (f"%22password%22%3A%22{WORD}%22", WORD),
    (f"token: “{WORD}”", WORD),
    (f"args: [--token, {WORD}]", WORD),
    (f"'passwords': {{'bob': '{WORD}'}}", WORD),
    (f"password: 'it''s {WORD}'", WORD),
    (f"bob:{WORD}@host.example/path", WORD),
    (f"vault login {WORD}", WORD),
    (f"sshpass -p '{PHRASE}' ssh host", "horse"),
    (f"redis-cli -a {WORD}", WORD),
    (f"creds={WORD}", WORD),
    ("age-secret".upper() + f"-key-1{HEX}".upper(), HEX.upper()),
    ("dckr" + f"_pat_{HEX[:27]}", HEX[:27]),
    ("SG" + f".{HEX[:22]}.{OPAQUE}", OPAQUE),
    ("AI" + f"za{OPAQUE[:35]}", OPAQUE[:35]),
    ("ya29" + f".{OPAQUE}", OPAQUE),
    ("pypi" + f"-{OPAQUE}", OPAQUE),
    ("nvapi" + f"-{HEX}", HEX),
    ("gsk" + f"_{HEX}", HEX),
    ("rk" + f"_live_{HEX[:24]}", HEX[:24]),
    ("LS0tLS1CR" + f"UdJTiBS{HEX}", HEX),
    ("https://discord.com/api" + f"/webhooks/1/{HEX}", HEX),
    (f"HUGGING_FACE_HUB_TOKEN\t{WORD}", WORD),
]

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
