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
    "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "sk-proj-Ab1dEfGhIjKlMnOp",
    "sk-ant-api03-aBcdefgh0ijklmnopqr_stu",
    "sk-0123456789abcdef0123456789abcdef",
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
        *(
            *("model.hf_token", "a.json_token", "accesstoken"),
            "apiToken",
            "HUBTOKEN",
            "sig",
            "X-Amz-Signature",
            "SharedAccessSignature",
            "AZURE_SAS",
        ),
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
        *("tiktoken-pattern", "--multi-token-prediction", "--expert-token-capacity", "--subtoken"),
        *("--custom-token-counting", "tiktoken", "signal", "signature_method", "sassy", "token.py"),
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
        ("https://h/a?sv=1&sig=a%2Bb%3D", "https://h/a?sv=1&sig=***"),
        ("https://h/a?X-Amz-Date=2&X-Amz-Signature=0f", "https://h/a?X-Amz-Date=2&X-Amz-Signature=***"),
        ("SharedAccessSignature=sv=1&sig=ab;x=1", "SharedAccessSignature=***&sig=***;x=1"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: Basic ***"),
        ("Authorization: Basic opaque", "Authorization: Basic ***"),
        ("proxy sent basic dXNlcjpwdw==, x", "proxy sent basic ***, x"),
        (f"https://{FORMS[0]}@huggingface.co/x", "https://***@huggingface.co/x"),
        ("password: Token x", "password: ***"),
        ("password: x", "password: ***"),
        ("password = x", "password = ***"),
        ("password:x", "password:***"),
        ("db_password= 'a b' 1", "db_password= '***' 1"),
        ("X-Auth-Token:abcdef012345", "X-Auth-Token:***"),
        ("  api_key ........................ x y\nz", "  api_key ........................ ***\nz"),
        ("  hf_token ....................... x", "  hf_token ....................... ***"),
    ],
)
def test_passwords_and_named_values_are_masked_in_text(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("out of memory on rank 3 in phase init: peak 12,345 MiB", "/data/disk-usage/hf_hub", "sk-learn"),
        *("http://localhost:6006/a", "[2001:db8::1]:29500", "a risk-free disk-based task-list", "bearer of"),
        *("sorted(rows, key=lambda row: row.key)", "num_token=5", "hf_llama/model", "eyJ", "2x4:8@gpu"),
        *("/models/hf_mixtral8x7b", "convert_hf_checkpoint2.py", "/data/oscar/sk-wiki-20240101"),
        *(
            "unexpected token: foo at 12",
            "ms per token: 12.5",
            "if token == other",
            "auth::login",
            "auth.py:12",
        ),
        *("  api_key ............. None", "def f(password: str, n=1)", "basic training", "token = tokens[0]"),
        *(
            "Basic TransformerLayer",
            "signature = inspect.signature(f)",
            "secret://host",
            "tiktoken_pattern=v2",
        ),
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
            *(
                "token ",
                "token .",
                "token: ",
                "basic ",
                "basic a",
                "password = ",
                "token .... ",
                "secret:",
                "`token:",
            ),
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


def test_a_word_that_was_a_variables_value_is_the_same_where_both_have_a_variables_value() -> None:
    words = ["x.py", "--run", "a-secret-value-b"]
    collect_secrets(environment={"HF_TOKEN": "secret-value"})
    begun = masked_argv(words)
    assert begun == ["x.py", "--run", "a-***-b"]
    assert is_same_command(begun, words)
    collect_secrets(environment={"HF_TOKEN": "renewed-value"})
    assert is_same_command(begun, ["x.py", "--run", "a-renewed-value-b"])
    assert not is_same_command(begun, ["x.py", "--run", "a-another-b"])
    assert not is_same_command(begun, ["x.py", "--run", "a-c"])


def test_a_bare_keys_value_that_an_earlier_release_masked_is_the_same() -> None:
    begun = ["x.py", "--input_key", "***", "sort_key=***"]
    assert is_same_command(begun, ["x.py", "--input_key", "question", "sort_key=size"])
    assert not is_same_command(begun, ["x.py", "--input-key", "question", "sort_key=size"])
    assert not is_same_command(["x.py", "--load", "/m/***"], ["x.py", "--load", "/m/hf_mixtral8x7b"])


PIECES = st.sampled_from(
    [
        *(
            "/",
            "hf_",
            "sk-",
            "mixtral8x7b",
            "mixtral8x22b",
            "20240101",
            "wiki-",
            "token",
            "key",
            "auth:v",
            ".",
        ),
        *("data", "s3://", "abcdefghijklmnop0123456789", "AbCdEfGhIjKl0123456789", "_", "secret:", "basic"),
    ]
)
PATHS = st.lists(PIECES, min_size=1, max_size=9).map(lambda pieces: "/m/" + "".join(pieces))


@given(begun=PATHS, now=PATHS)
def test_two_paths_are_two_commands(begun: str, now: str) -> None:
    for words, others in (([begun], [now]), (["--load", begun], ["--load", now])):
        assert is_same_command(masked_argv(words), others) == (begun == now)


@pytest.mark.parametrize(
    ("begun", "now"),
    [
        (["--tiktoken-pattern", "v1"], ["--tiktoken-pattern", "v2"]),
        (["--load", "/m/hf_mixtral8x7b"], ["--load", "/m/hf_mixtral8x22b"]),
        (["--load=hf_mixtral8x7b"], ["--load=hf_mixtral8x22b"]),
        (["convert_hf_checkpoint2.py"], ["convert_hf_checkpoint3.py"]),
        (["--data", "sk-wiki-20240101"], ["--data", "sk-wiki-20240102"]),
        (["--input_key", "question"], ["--input_key", "answer"]),
    ],
)
def test_names_and_words_that_look_a_little_like_secrets_are_compared(
    begun: list[str], now: list[str]
) -> None:
    assert masked_argv(begun) == begun
    assert not is_same_command(masked_argv(begun), now)


def test_common_words_behind_bare_keys_stay_in_any_text() -> None:
    environment = {"SORT_KEY": "iteration", "MY_KEY": "abcdef0123456789", "HF_TOKEN": "swordfish"}
    collect_secrets(["x.py", "--input_key", "question", "--text-key=content"], environment=environment)
    text = "a question of taste and content in iteration 3: swordfish abcdef0123456789"
    assert masked(text) == "a question of taste and content in iteration 3: *** ***"


def test_a_scripts_variables_are_never_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_SECRET_PATH", "x")
    assert shell_words(["a.py", "--path", FORMS[0]]).startswith('a.py --path "${QUARTET_SECRET_PATH_2:?')
    assert shell_words(["a.py", "--home", FORMS[0]]).startswith('a.py --home "${QUARTET_SECRET_HOME:?')


def test_a_shell_line_takes_secrets_from_variables() -> None:
    words = ["env", "HF_TOKEN=abc", "x.py", "--api-key", "de f", "--auth=gh'i", "--lr", "$1", "it's"]
    words += ["--db", "s3://me:pass'w@h/d e", FORMS[0], "--api-key", "another"]
    line = shell_words(words)
    assert not any(secret in line for secret in ("abc", "de f", "gh'i", "pass'w", FORMS[0], "another"))
    secrets = {"_HF_TOKEN": "abc", "_API_KEY": "de f", "_AUTH": "gh'i", "_S3_ME": "pass'w"}
    secrets |= {"": FORMS[0], "_API_KEY_2": "another"}
    secrets = {f"QUARTET_SECRET{name}": value for name, value in secrets.items()}
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env=secrets
    )
    assert done.stdout.decode().split("\0")[:-1] == words
    unset = subprocess.run(["sh", "-c", line], capture_output=True, check=False, env={"API_KEY": "abc"})
    assert unset.returncode != 0
    assert b"QUARTET_SECRET_HF_TOKEN" in unset.stderr


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
