"""Settings: files, then flags; every mistake is an error that names the nearest right thing."""

import resource
import subprocess
import sys

import pytest

from kvnotes import config as configs
from kvnotes.config import ConfigError, RunConfig
from kvnotes.errors import UnknownName


def make(**flags):
    return configs.make(RunConfig, study="locality", flags=flags)


def test_flags_override_files_and_none_means_not_given():
    assert make().n == configs.read_yaml(configs.CONFIGS / "default.yaml")["n"]
    assert make(n=3, seed=None).n == 3
    assert make(n=3, seed=None).seed == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"n": 0}, "setting 'n' .*cannot be 0"),
        ({"n": "many"}, "setting 'n' .*'many'"),
        ({"dtype": "int8"}, "setting 'dtype'"),
        ({"device": "tpu"}, "setting 'device'"),
        ({"level": 1.0}, "setting 'level'"),
        ({"pair": "both"}, "setting 'pair'"),
        ({"resamples": 100}, "too few for level 0.95: use at least 200"),
        ({"dtype": "bfloat16"}, "moves recovery by 0.1"),
        ({"wording": "trigger"}, "of polarity pairs only"),
    ],
)
def test_values_out_of_bounds(flags, message):
    with pytest.raises(ConfigError, match=message):
        make(**flags)


def test_an_unknown_key_suggests_the_nearest():
    with pytest.raises(UnknownName, match="unknown config key 'layuot': did you mean 'layout'"):
        make(layuot="all")


def test_an_unknown_key_in_a_file_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "default.yaml").write_text((configs.CONFIGS / "default.yaml").read_text() + "resample: 3\n")
    (tmp_path / "locality.yaml").write_text("pair: field\n")
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    with pytest.raises(UnknownName, match="did you mean 'resamples'"):
        make()
    (tmp_path / "locality.yaml").write_text("- a list\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        make()
    (tmp_path / "locality.yaml").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        make()


def test_what_is_hashed_and_what_only_names_the_record(tmp_path):
    assert make().hash() == make(results=tmp_path).hash()
    assert make().hash() != make(seed=1).hash()
    assert configs.is_default(make(model="smollm2-135m", layout="all", results=tmp_path))
    assert not configs.is_default(make(seed=1))
    assert not configs.is_default(make(task="planted"))


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "probes.locality", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_unknown_flag_suggests_the_nearest():
    done = run("--modell", "x")
    assert done.returncode == 2
    assert "--model" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_answers_in_under_a_second_and_lists_every_setting():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    for name in set(RunConfig.model_fields) - {"study"}:
        assert f"--{name.replace('_', '-')}" in done.stdout
    assert "(default: 48)" in done.stdout
    # the processor's seconds, which are the wall clock's unless the machine is busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
