"""Settings come from flags and the environment, once; a wrong one is one line that names it."""

from __future__ import annotations

import pytest

from kvservice.settings import ServiceSettings, load


class Sample(ServiceSettings):
    slots: int = 4


def test_defaults_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Sample, [], "sample").slots == 4
    monkeypatch.setenv("KVFLEET_SLOTS", "7")
    monkeypatch.setenv("KVFLEET_NATS_URL", "nats://a:1, nats://b:2")
    settings = load(Sample, [], "sample")
    assert settings.slots == 7
    assert settings.nats_servers == ["nats://a:1", "nats://b:2"]
    assert load(Sample, ["--slots", "9"], "sample").slots == 9, "a flag wins"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Sample, [], "sample").slots = 5


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--slots", "many"], "--slots"), (["--metrics-port", "70000"], "--metrics-port"), (["--absent", "1"], "absent")],
)
def test_a_wrong_value_names_the_flag(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Sample, flags, "sample")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
