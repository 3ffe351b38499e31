"""Shapes that were written down without a look at the rules: of clouds and services, of tools, of what wraps and colours a log."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import textwrap
from urllib.parse import quote

import pytest

from tiercheck.redaction import GONE, redacted


def made(size: int, seed: str = "not a secret") -> str:
    """Letters and digits as by chance, made here so that no scanner finds them in this file."""
    drawn = base64.b64encode(hashlib.shake_256(seed.encode()).digest(2 * size)).decode()
    return re.sub("[+/=]", "", drawn)[:size]


def digits(size: int, seed: str = "not a secret") -> str:
    return hashlib.shake_256(seed.encode()).hexdigest(size)[:size]


WORD = "hunter2-" + "0f9a"
LETTERS = "opensesame"
ODD = "p@s,s(w0)rd#1"
PHRASE = "correct horse battery staple"
M20, M22, M24, M27, M32, M36, M40, M43, M64, M86 = (made(size) for size in (20, 22, 24, 27, 32, 36, 40, 43, 64, 86))
H16, H32, H40, H64 = (digits(size) for size in (16, 32, 40, 64))
BEGIN, END = "-----BEGIN {}PRIVATE KEY-----", "-----END {}PRIVATE KEY-----"
PEM = "\n".join([BEGIN.format(""), *textwrap.wrap(made(200), 64), END.format("")])
BASIC = base64.b64encode(f"bob:{WORD}".encode()).decode()
DOCKER = json.dumps({"auths": {"registry.example": {"auth": BASIC}}})
JWT = "ey" + "JhbGciOiJIUzI1NiJ9.ey" + f"JzdWIiOiIxIn0.{M43}"
RED, BOLD, OFF = "\x1b[31m", "\x1b[1;38;5;208m", "\x1b[0m"
LINK = "\x1b]8;;https://a.example\x07"
ZERO, JOINER, MARK, SOFT, BLANK = "\u200b", "\u2060", "\ufeff", "\u00ad", "\u00a0"

SECRETS: list[tuple[str, str]] = [
    # clouds
    (f"AWS_ACCESS_KEY_ID=AK{'IA'}{M20[:16].upper()} AWS_SECRET_ACCESS_KEY={M40}", M40),
    (f"aws configure set aws_secret_access_key {M40}", M40),
    (f"Credentials(access_key='AK', secret_key='{LETTERS}', token=None)", LETTERS),
    (f'"SecretAccessKey": "{M40}", "SessionToken": "{M86}"', M86),
    (f"https://b.s3.amazonaws.com/o?X-Amz-Credential=AK{'IA'}{H16.upper()}%2F20260101&X-Amz-Signature={H64}", H64),
    (f"https://b.s3.amazonaws.com/o?AWSAccessKeyId=x&Signature={quote(M27 + '=', safe='')}&Expires=1", M27),
    (json.dumps({"type": "service_account", "private_key_id": H40, "private_key": PEM}), made(200)[:60]),
    (json.dumps({"type": "service_account", "private_key_id": H40}), H40),
    (json.dumps(json.dumps({"sa": json.dumps({"private_key": PEM})})), made(200)[:60]),
    (f"GCS HMAC secret: {M40}", M40),
    (f"GOOG1E{M40.upper()}", M40.upper()),
    (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={M86}==;EndpointSuffix=core.windows.net", M86),
    (f"BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature=sv=2022&sig={quote(M43 + '=', safe='')}", M43),
    (f"https://a.blob.core.windows.net/c/o?se=2026-01-01&sp=r&sig={quote(M43 + '=', safe='')}&sv=2022", M43),
    (f"AZURE_CLIENT_SECRET: abc8Q~{M32}.x", M32),
    (f"Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey={M43}=", M43),
    (f"OCI fingerprint ok, pass_phrase={LETTERS}", LETTERS),
    (f"LTAI{'5t'}{M20}", M20),
    # services, by their looks
    ("gho" + f"_{M36}", M36),
    ("github" + f"_pat_{M22}_{made(59)}", M22),
    ("glrt" + f"-{M20}", M20),
    ("hf" + f"_{M36}", M36),
    ("sk-svc" + f"acct-{M64}", M64),
    ("sk-ant" + f"-admin01-{M86}AA", M86),
    ("xoxe.xox" + f"p-1-{M64}", M64),
    ("xapp" + f"-1-A0-1-{H64}", H64),
    ("whsec" + f"_{M32}", M32),
    ("sk" + f"_live_{M24}", M24),
    ("npm" + f"_{M36}", M36),
    (f"//registry.example/:_authToken={LETTERS}", LETTERS),
    (f"//registry.example/:_password={LETTERS}", LETTERS),
    ("pypi-AgEIcHlwaS" + f"5vcmc{M86}", M86),
    (f"[pypi]\nusername = __token__\npassword = {LETTERS}", LETTERS),
    ("dop" + f"_v1_{H64}", H64),
    ("EAAC" + f"EdEose0cBA{M86}", M86),
    ("key-" + H32, H32),
    ("SK" + H32, H32),
    ("sq0csp" + f"-{M43}", M43),
    ("PMAK" + f"-{H40[:24]}-{H40[:34]}", H40[:34]),
    ("glsa" + f"_{M32}_{H16[:8]}", M32),
    ("sntrys" + f"_{M64}", M64),
    (f"https://{H32}@o1.ingest.sentry.io/2", H32),
    ("figd" + f"_{M40}", M40),
    ("ntn" + f"_{M43}", M43),
    ("tfp" + f"_{M43}", M43),
    ("1/" + f"{M43}.atlasv1.{M64}", M64),
    (f"MTI{made(21)}.{made(6)}.{M27}", M27),
    (f"123456789:AA{made(33)}", made(33)),
    (f"DD_API_KEY={H32} DD_APP_KEY={H40}", H40),
    (f"COMET_API_KEY={M24}", M24),
    (f"MLFLOW_TRACKING_PASSWORD={LETTERS}", LETTERS),
    (f"wandb: Appending key for api.wandb.ai to your netrc file: {H40}", H40),
    (f"wandb.login(key='{H40}')", H40),
    (f"NEPTUNE_API_TOKEN={base64.b64encode(json.dumps({'api_key': M32}).encode()).decode()}", "eyJ"),
    # names
    (f"applicationKey: {M32}", M32),
    (f"application-key={H32}", H32),
    (f"wpa_psk={H64}", H64),
    (f"psk={LETTERS}", LETTERS),
    (f'psk="{LETTERS}"', LETTERS),
    (f"bindpw {LETTERS}", LETTERS),
    (f"bindpw: {LETTERS}", LETTERS),
    (f"ldapsearch -D cn=admin -w {LETTERS} -b dc=x", LETTERS),
    (f"olcRootPW: {LETTERS}", LETTERS),
    (f"requirepass {LETTERS}", LETTERS),
    (f"rabbitmq default_pass = {LETTERS}", LETTERS),
    (f"userPass={LETTERS}", LETTERS),
    (f"DBPASSWORD={LETTERS}", LETTERS),
    (f"passwd={LETTERS}", LETTERS),
    (f"storepass {LETTERS} -keypass {WORD}", LETTERS),
    (f"keytool -storepass {LETTERS} -keystore x.jks", LETTERS),
    (f"openssl enc -pass pass:{LETTERS}", LETTERS),
    (f"consumerKey={M24}", M24),
    (f"appKey: {H32}", H32),
    (f"HMAC_KEY={H64}", H64),
    (f"webhook_url=https://a.example/hook/{H32}", H32),
    (f"client.pin: 1234-{H16}", H16),
    (f"mnemonic: {PHRASE}", "horse"),
    (f"seed phrase: {PHRASE}", "horse"),
    (f"contraseña: {LETTERS}", LETTERS),
    (f"Kennwort: {LETTERS}", LETTERS),
    (f"Passwort={LETTERS}", LETTERS),
    (f"mot de passe : {LETTERS}", LETTERS),
    (f"SSHPASS={LETTERS}", LETTERS),
    (f"bearer={M32}", M32),
    (f"jwt: {JWT}", M43),
    (f"_auth={BASIC}", BASIC),
    (f"PASSWORD_HASH=$2b$12${made(53)}", made(53)),
    (f"bob:$6$salt${M86}:19000:0:99999:7:::", M86),
    # sentences
    (f"{WORD} is the password", WORD),
    (f"'{LETTERS}' is not a valid password", LETTERS),
    (f'"{LETTERS}" (password)', LETTERS),
    (f"tried {WORD} as the token for bob", WORD),
    (f"use {WORD} for the api key", WORD),
    (f"logging in as bob with password {LETTERS}", LETTERS),
    (f"logging in as bob with password '{LETTERS}'", LETTERS),
    (f"login failed for bob/{WORD} (user/password)", WORD),
    (f"password set to {WORD}", WORD),
    (f"password changed from {WORD} to {ODD}", WORD),
    (f"your token, {WORD}, has expired", WORD),
    (f"token ({WORD}) has expired", WORD),
    (f"token [{WORD}] has expired", WORD),
    (f"token <{WORD}> has expired", WORD),
    (f"token `{LETTERS}` has expired", LETTERS),
    (f"wrong password «{LETTERS}»", LETTERS),
    # commands
    (f"curl -u bob:{LETTERS} -X POST https://a.example", LETTERS),
    (f"curl -ubob:{LETTERS} https://a.example", LETTERS),
    (f"wget --http-user=bob --http-password={LETTERS} https://a.example", LETTERS),
    (f"mysql -h db -u bob -p{LETTERS} train", LETTERS),
    (f"PGPASSWORD={LETTERS} psql -h db -U bob", LETTERS),
    (f"psql 'host=db user=bob password={ODD}'", ODD),
    (f"psql postgresql://bob:{ODD}@db/x", "w0)rd"),
    (f"mongosh mongodb+srv://bob:{LETTERS}@c.example/x", LETTERS),
    (f"amqps://bob:{quote(ODD)}@mq:5671/v", quote(ODD)),
    (f"celery -b redis://default:{LETTERS}@cache:6379/0", LETTERS),
    (f"jdbc:oracle:thin:bob/{LETTERS}@//db:1521/x", LETTERS),
    (f"jdbc:sqlserver://db;user=bob;password={LETTERS};encrypt=true", LETTERS),
    (f"smbclient //h/s -U 'bob%{LETTERS}'", LETTERS),
    (f"net use z: //h/s /user:bob /password:{LETTERS}", LETTERS),
    (f"echo {LETTERS} | docker login -u bob --password-stdin", LETTERS),
    (f"echo '{LETTERS}' | sudo -S true", LETTERS),
    (f"kubectl create secret generic s3 --from-literal=a={LETTERS}", LETTERS),
    (f"kubectl create secret docker-registry r --docker-password={LETTERS}", LETTERS),
    (f"kubectl config set-credentials bob --token {LETTERS}", LETTERS),
    (f"helm install x . --set db.password={LETTERS},replicas=3", LETTERS),
    (f"az login --service-principal -u a -p {LETTERS} --tenant t", LETTERS),
    (f"redis-cli -h cache -a {LETTERS} ping", LETTERS),
    (f"SET PASSWORD FOR 'bob' = '{LETTERS}'", LETTERS),
    (f"CREATE USER bob IDENTIFIED BY '{LETTERS}'", LETTERS),
    (f"ALTER ROLE bob WITH ENCRYPTED PASSWORD '{LETTERS}'", LETTERS),
    (f"machine api.wandb.ai\n  login user\n  password {LETTERS}", LETTERS),
    # files
    (DOCKER, BASIC),
    (DOCKER.replace('"', '\\"'), BASIC),
    (f"users:\n- name: bob\n  user:\n    client-key-data: {M64}\n    token: {LETTERS}", LETTERS),
    (f"kind: Secret\ndata:\n  whatever: {BASIC}\ntype: Opaque", BASIC),
    (f"password: >\n  {LETTERS}\n  and {WORD}\nuser: bob", WORD),
    (f"password: |-\n\n  {LETTERS}\nuser: bob", LETTERS),
    (f"password: !!str {LETTERS}", LETTERS),
    (f"password: &p {LETTERS}", LETTERS),
    (f"? password\n: {LETTERS}", LETTERS),
    (f'password = """\n{LETTERS}\n{WORD}\n"""\nuser = "bob"', LETTERS),
    (f"password = '''{LETTERS}'''", LETTERS),
    (f'password = """{LETTERS}"""', LETTERS),
    (f"[[password]]\nvalue = '{LETTERS}'", LETTERS),
    (f"<password>\n  {LETTERS}\n</password>", LETTERS),
    (f'<add key="Password" value="{LETTERS}"/>', LETTERS),
    (f'<property name="password">{LETTERS}</property>', LETTERS),
    (f'<db password="{LETTERS}" user="bob"/>', LETTERS),
    (f"<password><![CDATA[{LETTERS}]]></password>", LETTERS),
    (f"<ns:password xsi:type='string'>{LETTERS}</ns:password>", LETTERS),
    (f"password,{LETTERS}", LETTERS),
    (f'resource "x" {{\n  password = "{LETTERS}"\n}}', LETTERS),
    (f"cat <<EOF > password\n{WORD}\nEOF", WORD),
    # Python
    (f"Config(user='bob', password='{LETTERS}', port=1)", LETTERS),
    (f"Config(user='bob', password={LETTERS}, port=1)", LETTERS),
    (f"('password', '{LETTERS}')", LETTERS),
    (f"[('user', 'bob'), ('password', '{LETTERS}')]", LETTERS),
    (f"(b'password', b'{LETTERS}')", LETTERS),
    (f"(\"password\", SecretStr('{LETTERS}'))", LETTERS),
    (f"password=SecretStr('{LETTERS}')", LETTERS),
    (f"    password = '{LETTERS}'\n    user = 'bob'\nValueError: no", LETTERS),
    (f"  self.password: str = '{LETTERS}'", LETTERS),
    (f"password: Optional[str] = '{LETTERS}'", LETTERS),
    (f"{{'password': ['{LETTERS}', '{WORD}']}}", WORD),
    (f"{{'password': ('{LETTERS}',)}}", LETTERS),
    (f"{{'headers': {{b'authorization': b'Bearer {M32}'}}}}", M32),
    (f"environ({{'HF_TOKEN': '{LETTERS}', 'HOME': '/root'}})", LETTERS),
    (f"setattr(config, 'password', '{LETTERS}')", LETTERS),
    (f"assert password == '{LETTERS}'", LETTERS),
    (f"getpass() returned '{LETTERS}'", LETTERS),
    (f"Namespace(lr=0.1, hf_token='{LETTERS}')", LETTERS),
    # JSON within JSON, addresses, bytes
    (json.dumps({"m": json.dumps({"m": json.dumps({"password": LETTERS})})}), LETTERS),
    (f"%7B%22password%22%3A%20%22{LETTERS}%22%7D", LETTERS),
    (f"%257B%2522password%2522%253A%2522{LETTERS}%2522%257D", LETTERS),
    (f"password%3D{LETTERS}%26user%3Dbob", LETTERS),
    (f"https%3A%2F%2Fbob%3A{LETTERS}%40a.example%2Fx", LETTERS),
    (f"a=1&pass%77ord={LETTERS}&b=2", LETTERS),
    (f'{{"pass\\u0077ord": "{LETTERS}"}}', LETTERS),
    (f"\\x70assword={LETTERS}", LETTERS),
    (f"&#112;assword=&#39;{LETTERS}&#39;", LETTERS),
    (f"p%61ssword=\n  {LETTERS}", LETTERS),
    # HTTP
    (f"Authorization: Basic {BASIC}", BASIC),
    (f"> authorization: Basic {BASIC}\n< HTTP/1.1 401", BASIC),
    (f"header: ['Basic {BASIC}']", BASIC),
    (f"Cookie: JSESSIONID={H32}; csrftoken={M32}", M32),
    (f"set-cookie: __Host-id={M32}; Secure; HttpOnly", M32),
    (f"X-Amz-Security-Token: {M86}", M86),
    (f"Ocp-Apim-Subscription-Key: {H32}", H32),
    (f"api-key: {H32}", H32),
    (f"GET /x?access_token={LETTERS}&y=1 HTTP/1.1", LETTERS),
    (f"GET /cb?code={H32}&state=1", H32),
    (f"grant_type=password&username=bob&password={LETTERS}", LETTERS),
    (f"client_assertion={JWT}", M43),
    (f"{{:authorization \"Bearer {LETTERS}\"}}", LETTERS),
    (f"send: b'GET / HTTP/1.1\\r\\nAuthorization: Basic {BASIC}\\r\\nAccept: */*\\r\\n'", BASIC),
    # colours and what nobody sees
    (f"{RED}password{OFF}={LETTERS}", LETTERS),
    (f"pass{RED}word{OFF}={LETTERS}", LETTERS),
    (f"password{OFF}{BOLD}={OFF}{RED}{LETTERS}{OFF}", LETTERS),
    (f"password={RED}{LETTERS[:4]}{OFF}{LETTERS[4:]}", LETTERS[4:]),
    (f"{LINK}password\x1b]8;;\x07: {LETTERS}", LETTERS),
    (f"\\x1b[31mpassword\\x1b[0m={LETTERS}", LETTERS),
    (f"\\u001b[31mpassword\\u001b[0m: {LETTERS}", LETTERS),
    (f"^[[31mpassword^[[0m={LETTERS}", LETTERS),
    (f"gh{RED}p_{OFF}{M36}", M36),
    (f"pass{ZERO}word={LETTERS}", LETTERS),
    (f"pass{SOFT}word{JOINER}={MARK}{LETTERS}", LETTERS),
    (f"password{BLANK}={BLANK}{LETTERS}", LETTERS),
    (f"password：{LETTERS}", LETTERS),
    (f"ｐａｓｓｗｏｒｄ={LETTERS}", LETTERS),
    (f"p\x08password={LETTERS}", LETTERS),
    (f"password\x00={LETTERS}", LETTERS),
    (f"password=\x00{LETTERS}", LETTERS),
    (f"p\0a\0s\0s\0w\0o\0r\0d\0=\0{LETTERS}", LETTERS),
    # lines that a terminal or a writer wrapped
    (f"password=\\\n  {LETTERS}", LETTERS),
    (f"password = \\\n'{LETTERS}'", LETTERS),
    (f"--token \\\n    {LETTERS} \\\n    --lr 3", LETTERS),
    (f'"password"\n  : "{LETTERS}"', LETTERS),
    (f'"password":\n"{LETTERS}"', LETTERS),
    (f"'password',\n '{LETTERS}'", LETTERS),
    (f"password:\r\n  {LETTERS}\r\nuser: bob", LETTERS),
    (f"password={LETTERS}\r\nuser=bob", LETTERS),
    (f"progress 10%\rpassword={LETTERS}\rprogress 20%", LETTERS),
    (f"Authorization:\n Bearer {M32}", M32),
    (f"Authorization: Bearer\n {M32}", M32),
    (f"2026-01-01T00:00:00Z stdout P password=\n2026-01-01T00:00:00Z stdout F {WORD}", WORD),
    ("\n".join(f"2026-01-01T00:00:00Z stderr F {line}" for line in PEM.split("\n")), made(200)[70:120]),
    ("\n".join(f"[rank0]: {line}" for line in PEM.split("\n")), made(200)[70:120]),
    (f"> {PEM}".replace("\n", "\n> "), made(200)[70:120]),
]  # fmt: skip

HARMLESS = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 88, in main',
    "    loss.backward()",
    "    token_ids = tokenizer(text)['input_ids']",
    "    password = getpass.getpass()",
    "    key = ('model', 'layers.0.weight')",
    "    self.key = nn.Linear(768, 768)",
    "KeyError: 'layer.0.weight'",
    "key error: 'layer.0.weight'",
    'Error(s) in loading state_dict for GPT: Missing key(s) in state_dict: "lm_head.weight", "wte.weight".',
    'Unexpected key(s) in state_dict: "module.layers.11.attention.key.weight".',
    "size mismatch for layers.0.key.weight: copying a param with shape torch.Size([768, 768])",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity; 77.96 GiB already allocated)",
    "torch.OutOfMemoryError: CUDA out of memory. Process 12345 has 78.00 GiB memory in use.",
    "RuntimeError: NCCL communicator was aborted on rank 3. Original reason: watchdog timeout, work=ALLREDUCE SeqNum=1234",
    "[rank3]:[W1121 12:00:00.123456789 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: exitcode : -9 (pid: 4242)",
    "step 12480 | loss 2.3145 | lr 3.0e-04 | tokens/s 31250 | mfu 0.41",
    "token throughput: 12345 tokens/s",
    "tokens per second: 12,345.67",
    "consumed tokens: 1,048,576 of 300B",
    "the next token is 'the', its probability 0.31",
    "special tokens: ['<s>', '</s>', '<pad>']",
    "bos_token='<s>', eos_token='</s>', pad_token='<pad>'",
    "added_tokens.json: 100%|##########| 21.0/21.0 [00:00<00:00, 12.3kB/s]",
    "pod gpt-large-worker-7 was evicted: The node was low on resource: memory.",
    "Pod train/gpt-large-workers-0-3-x7k2p is Pending: 0/64 nodes are available: 64 Insufficient nvidia.com/gpu.",
    "replicaset gpt-large-5d9c7b6f8d scaled to 3",
    "Failed to pull image \"registry.example.com/team/train:2026.11.21-a1b2c3d\": rpc error: code = NotFound",
    "failed to authorize: failed to fetch anonymous token: unexpected status: 401 Unauthorized",
    "registry.example.com/team/train@sha256:" + digits(64),
    "uid 4f9c2a61-0b1d-4c53-9a55-7be1cf8dbb10, generation 7, resourceVersion 123456789",
    "s3://checkpoints/team-a/gpt-large/attempt-5/step-00012214/rank-00003/shard-00000-of-00056.safetensors",
    "object train/job/artifacts/100-1/rank-00003/" + digits(64) + " has 1.2 GiB",
    "checksum crc32c 0x9f86d081 of shard 3 does not match 0x884c7d65",
    "blake2b " + digits(64) + " differs from " + digits(64, "another"),
    "md5: " + digits(32) + ", etag: \"" + digits(32) + "-17\"",
    "commit " + digits(40) + " on main",
    "password: must not be empty",
    "password: must have at least 12 characters",
    "spec.password: Required value",
    "spec.token: Invalid value: must be a string",
    "the password must not be empty",
    "password is required",
    "missing required field: password",
    "wrong password for user bob",
    "user bob has no password",
    "a token is needed; see docs/security.md",
    "this token expires in 3600 s",
    "the key is not in the cache",
    "the key was read in 1.2 s",
    "key=value pairs are expected",
    "primary key violated: rows differ",
    "secret not found: my-s3-credentials",
    'secret "my-s3" not found',
    "Secret my-s3 has no key AWS_SECRET_ACCESS_KEY",
    "secretName: my-s3-credentials",
    "tokenExpirationSeconds: 3600",
    "token_type: bearer",
    "pass 3 of 5: 12 files compared",
    "the test passed: 12 of 12",
    "bypass: on, passthrough: false",
    "signature of forward(): (self, x, mask=None)",
    "session-affinity: ClientIP",
    "keys: ['a', 'b', 'c']",
    "keypoint detection: mAP 0.41",
    "monkey: 3, turkey: 4, keyboard: us",
    "author: Bob, authority: none",
    "compass: north, passenger: 3",
    "psk and pw are options of the access point",
    "spinning up 3 pins on node-3",
    "seed: 1234",
    "random seed: 20001 for rank 3",
    "hook registered at https://hooks.example.com/ready",
    "https://wandb.ai/team/project/runs/3k2j1h4g",
    "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/model-00001-of-00004.safetensors",
    "http://10.0.0.7:8472/metrics: connection refused",
    "connection to worker-3.gpt-large.train.svc.cluster.local:8471 lost: [Errno 104] Connection reset by peer",
    "NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO MASTER_ADDR=10.0.0.7 MASTER_PORT=29500 WORLD_SIZE=64",
    "args: ['python', 'train.py', '--lr', '3e-4', '--max-tokens', '4096', '--key-dim', '64']",
    "Model(key_dim=64, num_key_value_heads=8, key_padding_mask=None)",
    "authentication: x509: certificate signed by unknown authority",
    "error: You must be logged in to the server (Unauthorized)",
    "AccessDenied: User: arn:aws:iam::123456789012:role/train is not authorized to perform: s3:PutObject",
    "the bucket's credentials were refused (403), next attempt in 30 s",
    "credentials: refreshed after 3600 s",
    "bearer tokens are checked by the API server",
    "the cookie jar is empty",
    "-p 8472 is taken; mysql is not used",
    "mkdir -p /var/lib/tiercheck && cp -a /a /b",
    "docker run -p 8472:8472 -u 65532:65532 image",
    "ssh -p 2222 host",
    "\x1b[32mstep 12480\x1b[0m loss=2.31",
    "\x1b[1mkey\x1b[0m: layers.0.weight",
    "100%|\u2588\u2588\u2588\u2588| 12/12 [00:01<00:00,  8.11it/s]",
    "Gr\u00f6\u00dfe: 3\u00a0GiB, 12\u202f345 Tokens",
    "epoch 3\r\nepoch 4",
    "10%\r20%\r30%",
]  # fmt: skip

_UNSEEN = re.compile("\x1b\\[[0-9;]*m|\\\\x1b\\[[0-9;]*m|[\u200b\u2060\ufeff\u00ad\0]")


def _read(text: str) -> str:
    """As somebody sees it."""
    return _UNSEEN.sub("", text)


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_credentials_are_taken_out(text: str, secret: str) -> None:
    assert secret in text
    once = redacted(text)
    assert secret not in _read(once)
    assert GONE in once
    assert redacted(once) == once


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=range(len(SECRETS)))
def test_lines_around_a_credential_stay(text: str, secret: str) -> None:
    shown = redacted(f"2026-11-21 12:00:00,123 WARNING train: trouble\n{text}\nand on it went")
    assert secret not in _read(shown)
    assert shown.startswith("2026-11-21 12:00:00,123 WARNING train: trouble\n")
    assert shown.endswith("\nand on it went")


@pytest.mark.parametrize("line", HARMLESS)
def test_what_people_need_to_read_stays(line: str) -> None:
    assert redacted(line) == line
