"""No option is accepted in silence: it works, or it is an OptionError before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from loadkit.config import LoadConfig
from loadkit.errors import OptionError
from loadkit.known_names import KNOWN, Known

# What this version does not do yet, for a folder of safetensors.
UNUSED: dict[str, Any] = {
    "gguf_misaligned": "decode",
    "pt_load_map_location": "cuda:0",
    "network_deadline": 10.0,
    "network_timeout": 1.0,
    "revision": "main",
    "stream": True,
    "weights_key": "model",
}
# What every such load follows.
USED: dict[str, Any] = {
    "alias": "never",
    "allow_patterns_overrides": ("model*",),
    "allowed_roots": ("/tmp",),
    "cache_dir": "~/cache",
    "device": "cpu",
    "digest_store": "cache",  # others are refused without digests: see test_load_strategies
    "distribute": "broadcast",
    "download_dir": "~/down",
    "fall_back_to_pt": False,
    "ignore_index": True,
    "ignore_patterns": ("*.bin",),
    "load_format": "safetensors",
    "local_ranks": 2,
    "missing_ok": ("*.never",),
    "model_loader_extra_config": {},
    "num_threads": 1,
    "rank_timeout": loadkit.LoadConfig().rank_timeout,  # others need ranks: see test_load_together
    "reader": "pread",
    "reader_options": {},  # others are refused by readers that have none: see test_library_readers
    "safetensors_load_strategy": "eager",
    "safetensors_prefetch_block_size": 16 << 20,  # others are refused where nothing is prefetched
    "safetensors_prefetch_num_threads": 8,
    "staging_slot_bytes": 8 << 20,  # others are refused on the CPU: see test_staging
    "staging_slots": 16,
    "subfolder": "model",
    "trust_remote_code": True,
    "use_tqdm_on_load": False,
    "verify": "digest",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    write_llama(folder)
    write_llama(folder / "model")
    return folder


def test_every_field_is_in_one_of_the_lists() -> None:
    assert UNUSED.keys() | USED.keys() == LoadConfig.options().keys()
    assert not UNUSED.keys() & USED.keys()


@pytest.mark.parametrize("name", UNUSED)
def test_an_option_that_nobody_follows_is_refused(place: Path, name: str) -> None:
    options = LoadConfig(**{name: UNUSED[name]})
    for call in (loadkit.plan, loadkit.load):
        with pytest.raises(OptionError, match=f"{name}=.*'safetensors'") as caught:
            call(place, load_config=options)
        assert caught.value.detail == {"options": [name]}
        assert caught.value.hint
    with pytest.raises(OptionError, match=name):
        loadkit.load_into(nn.Linear(1, 1), place, load_config=options)
    with pytest.raises(OptionError, match=name):
        next(loadkit.iter_weights(place, load_config=options))


@pytest.mark.parametrize("name", USED)
def test_an_option_that_is_followed_is_taken(place: Path, name: str) -> None:
    assert loadkit.plan(place, load_config=LoadConfig(**{name: USED[name]})).ok


def test_all_of_them_are_named_at_once(place: Path) -> None:
    with pytest.raises(OptionError) as caught:
        loadkit.plan(place, load_config=LoadConfig(**UNUSED))
    assert sorted(caught.value.detail["options"]) == sorted(UNUSED)


def test_a_loader_says_which_it_follows(place: Path) -> None:
    with pytest.raises(OptionError, match="ignore_index=True: in this version neither load format"):
        loadkit.plan(place, load_format="dummy", load_config=LoadConfig(ignore_index=True))


def test_a_model_that_reads_no_checkpoint_fills_no_module(place: Path) -> None:
    with pytest.raises(OptionError, match="'dummy' makes whole models"):
        loadkit.load_into(nn.Linear(1, 1), place, load_format="dummy")
    with pytest.raises(OptionError, match="'dummy' makes whole models"):
        next(loadkit.iter_weights(place, load_format="dummy"))


@pytest.mark.parametrize(
    "device", ["xpu:98", "mps:98", "meta", "vulkan", "cuda:98", "none", "cpu:x"]
)
def test_a_device_that_is_not_here_is_refused_with_those_that_are(place: Path, device: str) -> None:
    with pytest.raises(OptionError, match=f"'{device}' is not available here; available: cpu"):
        loadkit.plan(place, device=device)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": 2}, "parallel is int; accepted: ParallelConfig"),
        ({"load_config": {"alias": "never"}}, "load_config is dict; accepted: LoadConfig"),
        ({"hf_overrides": 3}, "hf_overrides = 3 is an integer"),
        ({"quantization": 8}, "quantization = 8 is an integer"),
        ({"strict": "no"}, "strict is str; accepted: bool"),
    ],
)
def test_an_argument_of_another_type_is_refused(
    place: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        loadkit.plan(place, **options)


def test_a_method_that_is_not_installed_is_named(place: Path) -> None:
    with pytest.raises(loadkit.UnknownNameError, match="no quantisation method 'fp8'"):
        loadkit.plan(place, quantization="fp8")


def test_a_format_of_a_later_version_is_not_called_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN["loaders"], "later", Known("loadkit-default", "default"))
    with pytest.raises(loadkit.NotInstalledError, match=r"installed as .* and lacks it") as caught:
        loadkit.plan(place, load_format="later")
    assert caught.value.hint is None
