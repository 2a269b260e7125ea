"""Secrets are not written down."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.protocol import masking
from quartet_plugin.protocol.masking import (
    MASK,
    collect_secrets,
    is_masked,
    is_same_command,
    is_secret,
    masked,
    masked_argv,
    recorded_environment,
    shell_words,
)

FORMS = (
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "hf_" + "abcdefghijklmnopqrstuvwxyz",
    "sk-proj-Ab1dEfGhIjKlMnOp",
    "sk-ant-api03-abcdefghij_klm",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "gho_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0abcdefghij_klmnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefGHIJ",
    "xoxp-123456789012-abcdefGHIJ",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
)
# Neither a mask, nor what is stripped, nor the path of something.
VALUES = st.text(
    st.characters(blacklist_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), blacklist_characters="*/~.<>\x85\xa0"),
    min_size=masking.MIN_LITERAL,
    max_size=40,
)


@pytest.fixture(autouse=True)
def _only_these_secrets() -> Iterator[None]:
    collect_secrets(environment={})
    yield
    masking._known = None


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "--hub-token", "DB_PASSWORD", "AWS_SECRET", "key", "--my-api-key"),
        *("PGPASSWORD", "MY_APIKEY", "apiKey", "aws_secret_access_key", "AWS_ACCESS_KEY_ID", "--auth"),
        *("OAUTH", "Authorization", "PASSWORD_PROD", "HF_TOKEN_2", "--private-key", "X-Auth-Token"),
        *("GOOGLE_CREDENTIALS", "SMTP_PASSWD", "wandb.api_key", "HFToken", "ssh_private_key"),
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--tokenizer-model", "--kv-channels", "KEYBOARD", "--num-layers", "PATH", "--lr-decay-tokens"),
        *(
            "--moe-token-dispatcher-type",
            "--calculate-per-token-loss",
            "--eos-token",
            "TOKENIZERS_PARALLELISM",
        ),
        *("--author", "SSH_AUTH_SOCK", "XAUTHORITY", "--auth-type", "DB_PASSWORD_FILE", "", "-"),
    ],
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("secret", FORMS)
def test_tokens_of_a_known_form_are_masked_in_any_text(secret: str) -> None:
    assert masked(f"401 for {secret}: denied") == "401 for ***: denied"
    assert masked(f"('{secret}', 1)") == "('***', 1)"
    assert masked_argv(["train.py", secret, f"--x={secret}"]) == ["train.py", MASK, f"--x={MASK}"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc123DEF", "Authorization: Bearer ***"),
        ("postgresql://me:pa@ss@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("redis://:secret@host", "redis://:***@host"),
        ("https://h/a?token=abc&x=1", "https://h/a?token=***&x=1"),
        ("https://h/a?x=1&api_key=a=b", "https://h/a?x=1&api_key=***"),
        ('{"api_key": "abc", "lr": "1"}', '{"api_key": "***", "lr": "1"}'),
        ("{'password': 'a b', 'lr': 1}", "{'password': '***', 'lr': 1}"),
        ("login(token='abc', n=1)", "login(token='***', n=1)"),
        ("HF_TOKEN=abc python x.py", "HF_TOKEN=*** python x.py"),
        ("unrecognized arguments: --api-key=abc", "unrecognized arguments: --api-key=***"),
    ],
)
def test_passwords_and_named_values_are_masked_in_text(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("out of memory on rank 3 in phase init: 12,345 MiB more", "/data/disk-usage/hf_hub", "sk-learn"),
        *("http://localhost:6006/a", "[2001:db8::1]:29500", "a risk-free disk-based task-list", "bearer of"),
        *("sorted(rows, key=lambda row: row.key)", "num_token=5", "hf_llama/model", "eyJ", "2x4:8@gpu"),
        *("0F0 1F0 2B3", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "a://b", ""),
    ],
)
def test_other_text_stays(text: str) -> None:
    assert masked(text) == text


def test_values_of_telling_variables_are_masked_wherever_they_stand() -> None:
    forty = "0123456789abcdef0123456789abcdef01234567"
    collect_secrets(
        ["x.py", "--my-api-key", "flag-value", "--db", "mysql://u:url-value@h/d", "--auth=pair-value"],
        environment={"WANDB_API_KEY": forty, "AUTH": "1", "PLAIN": "plain-value", "DB": "s3://u:env-url@h"},
    )
    text = f"1 {forty}, flag-value! url-value; pair-value, env-url plain-value {forty[::-1]}"
    assert masked(text) == f"1 ***, ***! ***; ***, *** plain-value {forty[::-1]}"


def test_a_value_is_masked_as_urls_python_and_json_write_it() -> None:
    value = "p@ss'w\\ö\"rd"
    collect_secrets(environment={"DB_PASSWORD": value})
    for written in (value, repr(value), json.dumps(value), "p%40ss%27w%5C%C3%B6%22rd"):
        assert "rd" not in masked(f"see {written}").removeprefix("see ")


def test_every_line_of_a_long_secret_is_masked() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nEFAASCBKcwggSj\n-----END KEY-----\n"
    collect_secrets(environment={"SSH_PRIVATE_KEY": key})
    assert masked("a MIIEvQIBADANBgkqhkiG9w0BAQ b") == "a *** b"


def test_a_path_that_is_there_is_no_secret(tmp_path: object) -> None:
    collect_secrets(environment={"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path)})
    assert masked(f"{tmp_path}/runs/a") == f"{tmp_path}/runs/a"


@given(value=VALUES, before=st.text(max_size=60), after=st.text(max_size=60), other=VALUES)
def test_no_value_is_left_in_any_text(value: str, before: str, after: str, other: str) -> None:
    collect_secrets(["x.py", "--api-key", other], environment={"HF_TOKEN": value})
    shown = masked(f"{before}{value}{after}{other}{value[:3]}")
    assert value not in shown
    assert other.startswith("--") or other not in shown


@given(
    password=st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1).filter(
        lambda text: "/" not in text and not any(c.isspace() for c in text)
    )
)
def test_no_password_is_left_in_a_url(password: str) -> None:
    assert masked(f"at postgres://me:{password}@h/d") == "at postgres://me:***@h/d"


@given(words=st.lists(st.text(max_size=20), max_size=8))
def test_masking_keeps_the_number_of_words_and_comes_to_an_end(words: list[str]) -> None:
    shown = masked_argv(words)
    assert len(shown) == len(words)
    assert masked_argv(shown) == shown
    assert is_same_command(words, words)
    assert is_same_command(shown, words)


@pytest.mark.parametrize(
    "piece",
    [
        *("a", "-", "sk-", "hf_", "eyJ", "eyJa.", "://", "://a:", "a://b:c", "bearer ", "Bearer a", "token="),
        *(
            "token='",
            'token="',
            '"token": ',
            "=",
            "key=a",
            "xox",
            "xoxb-",
            "AKIA",
            "gho_",
            "@",
            "a@",
            "://u:p@",
        ),
    ],
)
def test_no_text_takes_longer_than_its_length(piece: str) -> None:
    """A scan that looked back at everything before would take hours here."""
    masked(piece * (400_000 // len(piece)))
    masked("://a:" + piece * (400_000 // len(piece)))


def test_argv() -> None:
    words = [
        *("env", "HF_TOKEN=abc", "torchrun", "a.py", "--api-key", "abc", "--auth=abc", "--lr", "1"),
        *("wandb.api_key=abc", "--moe-token-dispatcher-type", "alltoall", "--token", "--x"),
    ]
    assert masked_argv(words) == [
        *("env", "HF_TOKEN=***", "torchrun", "a.py", "--api-key", "***", "--auth=***", "--lr", "1"),
        *("wandb.api_key=***", "--moe-token-dispatcher-type", "alltoall", "--token", "--x"),
    ]


def test_a_command_is_the_same_when_its_secrets_are_renewed() -> None:
    words = ["env", "HF_TOKEN=abc", "x.py", "--api-key", "abc", "--db", "s3://u:p@h/d", "--lr", "1"]
    renewed = ["env", "HF_TOKEN=de", "x.py", "--api-key", "fgh", "--db", "s3://u:q@h/d", "--lr", "1"]
    earlier = ["env", "HF_TOKEN=<redacted>", "x.py", "--api-key", "<redacted>", *words[5:]]
    for begun in (words, masked_argv(words), earlier):
        assert is_same_command(begun, words)
        assert is_same_command(begun, renewed)
        assert not is_same_command(begun, [*words[:-1], "2"])
        assert not is_same_command(begun, words[:-1])
        assert not is_same_command(begun, [*words[:6], "s3://u:p@h/other", *words[7:]])
    assert is_masked(earlier)
    assert is_masked(masked_argv(words))
    assert not is_masked(["x.py", "--lr", "1"])


def test_a_word_that_was_a_variables_value_is_the_same_without_the_variable() -> None:
    words = ["x.py", "--run", "a-secret-value-b"]
    collect_secrets(environment={"HF_TOKEN": "secret-value"})
    begun = masked_argv(words)
    assert begun == ["x.py", "--run", "a-***-b"]
    collect_secrets(environment={})
    assert is_same_command(begun, words)
    assert not is_same_command(begun, ["x.py", "--run", "a-c"])


def test_a_shell_line_takes_secrets_from_variables() -> None:
    words = ["env", "HF_TOKEN=abc", "x.py", "--api-key", "de f", "--auth=gh'i", "--lr", "$1", "it's"]
    words += ["--db", "s3://me:pass'w@h/d e", FORMS[0], "--api-key", "another"]
    line = shell_words(words)
    assert not any(secret in line for secret in ("abc", "de f", "gh'i", "pass'w", FORMS[0], "another"))
    secrets = {"HF_TOKEN": "abc", "API_KEY": "de f", "AUTH": "gh'i", "S3_ME": "pass'w"}
    secrets |= {"SECRET": FORMS[0], "API_KEY_2": "another"}
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env=secrets
    )
    assert done.stdout.decode().split("\0")[:-1] == words
    unset = subprocess.run(["sh", "-c", line], capture_output=True, check=False, env={"HF_TOKEN": "abc"})
    assert unset.returncode != 0
    assert b"API_KEY" in unset.stderr


def test_environment() -> None:
    recorded = recorded_environment(
        {
            "NCCL_DEBUG": "x",
            "HOME": "/h",
            "SLURM_JWT_TOKEN": "t",
            "CUDA_VISIBLE_DEVICES": "0",
            "EDITOR": "vi",
            "MASTER_URL": "tcp://u:p@h",
        }
    )
    assert recorded == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "x",
        "SLURM_JWT_TOKEN": "***",
        "MASTER_URL": "tcp://u:***@h",
    }
