"""Credentials are masked everywhere, and other text is unchanged."""

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.git import mask, mask_override, refuse_secrets

# Put together here, so that no scanner takes this file for a leak.
HUB_TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsT"
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"token {HUB_TOKEN} here", HUB_TOKEN),
        (f"WANDB_API_KEY={WANDB_KEY}", WANDB_KEY),
        (f'+    api_key = "{WANDB_KEY}"', WANDB_KEY),
        ("wandb_v1_" + "abcdefghijklmnop1234", "abcdefghijklmnop1234"),
        ("https://joe:pa55word@example.org/data", "pa55word"),
        (f"https://{HUB_TOKEN}@example.org/data", HUB_TOKEN),
        ("https://example.org/data?sig=a1b2c3d4e5f6&x=1", "a1b2c3d4e5f6"),
        ("Authorization: Bearer abcd1234efgh5678", "abcd1234efgh5678"),
        ("password: 'correct-horse'", "correct-horse"),
        ("AKIA" + "ABCDEFGHIJ012345", "ABCDEFGHIJ012345"),
        ("ghp_" + "abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_masked(text: str, secret: str) -> None:
    masked = mask(text, {})
    assert secret not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "data.tokenizer=bytes",
        "token = tokenizer.next_token()",
        "max_tokens=1234567890",
        "pad_token='<|padding|>'",
        "index 0ca87bd1..ee416c32 100644",
        "commit 439754f0123456789abcdef0123456789abcdef0",
        "git@github.com:someone/something.git",
        "ssh://git@example.org/something",
        "someone@example.org",
        "https://example.org/a@b",
        "sort_key=lambda row: row[0]",
        "experiment.tags=[risk-averse,task-1]",
    ],
)
def test_left_alone(text: str) -> None:
    assert mask(text, {}) == text


def test_value_of_a_secret_variable_is_masked_anywhere() -> None:
    environment = {"MY_STORE_SECRET": "zanzibar77", "HOME": "/home/zanzibar78", "DEBUG_KEY": "1"}
    assert mask("print('zanzibar77')", environment) == "print('***')"
    assert mask("/home/zanzibar78 1", environment) == "/home/zanzibar78 1"


@pytest.mark.parametrize(
    ("override", "masked"),
    [
        ("+data.options.api_key=abc", "+data.options.api_key=***"),
        ("+data.options.hub_token=abc", "+data.options.hub_token=***"),
        ("+data.options.token=null", "+data.options.token=null"),
        ("+data.options.text_key=content", "+data.options.text_key=content"),
        (f"experiment.notes='see {HUB_TOKEN}'", "experiment.notes='see ***'"),
        ("~local@_global_", "~local@_global_"),
    ],
)
def test_overrides(override: str, masked: str) -> None:
    assert mask_override(override, {}) == masked


def test_a_configuration_with_credentials_is_refused_without_repeating_them() -> None:
    config = {
        "data": {"options": {"api_key": "abc", "nested": [{"url": "https://joe:pa55word@x.org"}], "text_key": "ok"}},
        "experiment": {"notes": HUB_TOKEN},
    }
    with pytest.raises(UserError) as caught:
        refuse_secrets(config)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["data.options.api_key", "data.options.nested[0].url", "experiment.notes"]
    assert not any(secret in str(caught.value) for secret in ("abc", "pa55word", HUB_TOKEN))


def test_every_shipped_default_is_accepted() -> None:
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_dict, to_experiment

    refuse_secrets(to_dict(to_experiment(compose(["data=c4", "tracking=all"]))))
