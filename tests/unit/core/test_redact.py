"""No secret is left, and ordinary text stays as it is."""

import pytest

from forge_core.redact import redact

S = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    "text",
    [
        f"sglang serve --api-key {S} --port 30000",
        f"--api-key={S}",
        f"--api-key '{S} with words'",
        f"--admin-api-key {S}",
        f"['sglang', 'serve', '--api-key', '{S}', '--port', '1']",
        f'["--api-key", "{S}"]',
        f"server_args=ServerArgs(model_path='m', api_key='{S}', port=1)",
        f'{{"api_key": "{S}", "x": 1}}',
        f'"{{\\"api_key\\": \\"{S}\\"}}"',
        f"OPENAI_API_KEY={S}",
        f"export HF_TOKEN={S}",
        f"HF_TOKEN='{S}'",
        f"hf_token: '{S}'",
        f"HUGGING_FACE_HUB_TOKEN={S}",
        f"docker run -e GITHUB_TOKEN={S} image",
        f"AWS_SECRET_ACCESS_KEY={S}",
        f"--registry-token {S}",
        f"--token {S}",
        f"password={S}",
        f"password: {S}",
        f'"password": "{S}"',
        f"POSTGRES_PASSWORD={S}",
        f"client_secret='{S}'",
        f"Authorization: Bearer {S}",
        f"authorization: basic {S}",
        f"{{'Authorization': 'Bearer {S}'}}",
        f"x-api-key: {S}",
        f"curl -H 'x-api-key: {S}'",
        f"GET /v1/models?api_key={S}&page=2",
        f'{{"auths": {{"registry": {{"auth": "{S}"}}}}}}',
        f"https://user:{S}@index.example/simple",
        f"https://user:p@{S}@index.example/simple",
        f"redis://:{S}@cache:6379/0",
        f"https://{S}{S}@github.example/x.git",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    masked = redact(text)
    assert S not in masked and "***" in masked
    assert redact(masked) == masked


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcdefghijklmnopqrstuvwxyz012345",
        "sk-proj-abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "glpat-abcdefghijklmnop1234",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0xMjM.c2lnbmF0dXJl",
    ],
)
def test_known_shapes_are_masked_under_any_name(value: str) -> None:
    assert redact(f"loading with {value} now") == "loading with *** now"


@pytest.mark.parametrize(
    "text",
    [
        "api_key=None, admin_api_key=None, port=30000",
        "'api_key': None",
        "api_key: null",
        "def connect(api_key: str | None = None) -> None:",
        "max_total_tokens=16384 max_new_tokens: 5 num_tokens=7",
        "--max-total-tokens 16384 --stop-token-ids 1 2",
        "tokenizer_path='/models/SmolLM2', tokenizer_mode='auto', tokenizer_worker_num=1",
        'eos_token="<|im_end|>" pad_token="<|endoftext|>"',
        '{"token": " Paris", "logprob": -0.1}',
        "TOKENIZERS_PARALLELISM=false",
        "gen throughput (token/s): 16.2, #token: 120, token usage: 0.01",
        "secrets are masked; passwords too",
        "https://index.example:8443/simple/torch/",
        "127.0.0.1:5000/sm120-forge/rehearsal@sha256:" + "a" * 64,
        "docker://127.0.0.1:5000/x@sha256:" + "a" * 64,
        "ssh://git@host.example/x.git",
        "git+https://host.example/x.git@v1.2",
        "author: Jane Doe <jane@example.org>",
        "task-abcdefghijklmnopqrstuvwxyz disk-0123456789012345678901",
        "sm_120a fp4_quantization_120.so 100%",
        "keyword=value monkey=1 key: value",
        "--api-key-file /run/secrets/key",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_what_follows_a_secret_stays() -> None:
    assert redact("--api-key sk-1 --port 30000") == "--api-key *** --port 30000"
    assert redact("ServerArgs(api_key='x', port=1)") == "ServerArgs(api_key='***', port=1)"
    assert redact("?api_key=x&page=2") == "?api_key=***&page=2"
    assert redact("https://u:p@host/a@b") == "https://u:***@host/a@b"


def test_known_values_are_masked_wherever_they_stand() -> None:
    assert redact("a hunter2 b", ["hunter2"]) == "a *** b"
    assert redact("x", ["", "y"]) == "x"
    assert redact("key-long", ["key", "key-long"]) == "***"
    assert redact("p%40ss%2Fw", ["p@ss/w"]) == "***"
