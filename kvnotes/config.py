"""Run settings: one validated, frozen model, filled from configs/default.yaml, then the study's file, then flags.

Defaults live in the YAML files only. No torch here, so that `--help` is instant.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvnotes import discover, weights
from kvnotes.errors import KVNotesError, UnknownName

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

MEGABYTE = 10**6

# What names the record (model, layout, task) or only says where it goes; everything else, changed, adds a hash.
NOT_IN_NAME = frozenset({"study", "model", "layout", "results", "memory"})


class ConfigError(KVNotesError):
    """A setting that is not allowed, with the file or flag and the bound it breaks."""


class RunConfig(BaseModel):
    """Everything that decides a run's numbers. A study may subclass it to add its own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    study: str = Field(description="the study's name")
    model: str = Field(description="registry name, local folder, hub id or planted model")
    task: str = Field(description="task family: a module of tasks/")
    pair: Literal["field", "polarity"] = Field(description="what differs between the arms")
    wording: str = Field(description="how a polarity pair inverts the rule: swap, or trigger (one token)")
    layout: str = Field(description="prompt layout, or 'all'")
    n: int = Field(ge=1, description="pairs a layout")
    seed: int = Field(ge=0, description="seed of pairs, fillers, resamples and draws")
    length: int = Field(ge=0, le=100_000, description="prompt length in tokens, about; 0 is the layout's own")
    query: int = Field(ge=1, description="tokens of the query block, recomputed over the cache")
    engine: Literal["rows", "hooks"] = Field(
        description="rows: many interventions a forward; hooks: bridge hooks, a whole forward each, the reference"
    )
    memory: int = Field(ge=1, description="megabytes that the activations of one batched forward may take")
    device: str = Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:<i>")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="precision of the forward passes")
    results: Path = Field(description="folder for records")
    gate_gap: float = Field(ge=0, description="least margin gap between the arms, in logits")
    level: float = Field(gt=0.5, lt=1, description="coverage of the intervals")
    resamples: int = Field(ge=100, le=1_000_000, description="bootstrap resamples")
    equivalence: float = Field(gt=0, description="margin of the 'about 0' tests, in recovery")
    identity: float = Field(gt=0, le=0.01, description="largest recovery error of an identity in float32")

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        needed = math.ceil(10 / (1 - self.level))
        if self.resamples < needed:
            raise ValueError(f"resamples {self.resamples} are too few for level {self.level}: use at least {needed}")
        if self.device == "cpu" and self.dtype != "float32":
            raise ValueError(f"dtype {self.dtype} on a CPU moves recovery by 0.1: use float32, or a GPU (device cuda)")
        if self.pair == "field" and self.wording != "swap":
            raise ValueError(f"wording {self.wording} is of polarity pairs only: use pair polarity")
        return self

    def hash(self) -> str:
        """SHA-256 of the settings that decide the numbers, and not where the record goes or what memory is used."""
        return hash_of({**self.model_dump(mode="json"), "model": weights.run_name(self.model)})


def hash_of(settings: Mapping[str, Any]) -> str:
    """`RunConfig.hash` of settings as a record keeps them."""
    chosen = {name: value for name, value in settings.items() if name not in ("results", "memory")}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, by `safe_load`. Raises ConfigError where the file is missing, broken or no mapping."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ConfigError(f"{path} does not exist; it belongs to the repository, so check the clone") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path} is not valid YAML: {err}") from err
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, it holds {type(loaded).__name__}")
    return loaded


def defaults(study: str) -> dict[str, Any]:
    """Settings before any flag: configs/default.yaml, overlaid with configs/<study>.yaml where it is a study."""
    own = read_yaml(CONFIGS / f"{study}.yaml") if study in discover.studies() else {}
    return {**read_yaml(CONFIGS / "default.yaml"), **own, "study": study}


def make(settings: type[RunConfig], *, study: str, flags: Mapping[str, Any]) -> RunConfig:
    """The run's frozen settings. `flags` holds what the user gave; None means not given.

    Raises UnknownName for a key no setting has, ConfigError for a value out of bounds.
    """
    merged = {**defaults(study), **{k: v for k, v in flags.items() if v is not None}}
    for key in merged:
        if key not in settings.model_fields:
            raise UnknownName(kind="config key", name=key, known=settings.model_fields)
    try:
        return settings(**merged)
    except ValidationError as err:
        raise ConfigError("; ".join(_explain(problem, settings) for problem in err.errors())) from err


def _explain(problem: Any, settings: type[RunConfig]) -> str:
    if not problem["loc"]:
        return str(problem["ctx"]["error"])
    key = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"setting {key!r} has no value: give it in configs/default.yaml or as --{key}"
    what = settings.model_fields[key].description
    return f"setting {key!r} ({what}) cannot be {problem['input']!r}: {problem['msg']}"


def is_default(config: RunConfig) -> bool:
    """Whether only what the record's path already says was chosen, all else being as the files say."""
    usual = make(type(config), study=config.study, flags={}).model_dump()
    return all(usual[k] == v for k, v in config.model_dump().items() if k not in NOT_IN_NAME)
