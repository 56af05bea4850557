"""``LoaderContract``: what every load format owes its users, as tests.

The same steps, the same strictness, the same partial reads, the same errors: a subclass says how
its format is written, and gets all of it checked. See ``loader_case`` for what it can say.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from loadkit import tables
from loadkit.errors import LoadkitError, NoWeightsError, OptionError, PlanError
from loadkit.load_plan import LoadPlan
from loadkit.testing.checkpoint import METHOD
from loadkit.testing.child import parameters_digest, run_child
from loadkit.testing.loader_case import LoaderCase, fail, weight_files, write_config
from loadkit.testing.model import joined
from loadkit.testing.watching import bytes_asked_for, landed_bytes, left_behind

__all__ = ["LoaderContract"]

_NORM = "model.norm.weight"
_DOWN = "model.layers.1.mlp.down_proj.weight"
_TALL = "model.layers.0.self_attn.o_proj.weight"
_EXTRA = "model.layers.1.mlp.mystery_proj.weight"
_TP = pytest.mark.parametrize("tp", [1, 2, 4])


class LoaderContract(LoaderCase):
    """Subclass it, give ``load_format`` and ``write``; see ``LoaderCase`` for the rest."""

    # -- the same model as from any other format ---------------------------------------------------

    @_TP
    def test_every_rank_has_the_parameters_of_the_default_loader(self, tp: int) -> None:
        self._needs(files=True, tp=tp)
        for rank in range(tp):
            model = self.load(self.checkpoint(tp), tp=tp, rank=rank).model
            expected = self.default_parameters(tp, rank)
            self.check_same(self.parameters(model), expected, f"rank {rank} of {tp}")

    @_TP
    def test_the_ranks_join_to_the_checkpoint(self, tp: int) -> None:
        self._needs(own_model=True, tp=tp)
        ranks = [self.load(self.checkpoint(tp), tp=tp, rank=rank).model for rank in range(tp)]
        for model in ranks:
            numbers = self.parameters(model)
            for name, param in model.named_parameters():
                param.data = numbers[name]
        if self.reads_files:
            expected = self.weights()
        else:
            expected = joined([self.load(self.checkpoint()).model])
        self.check_same(joined(ranks), expected, f"the ranks of tp {tp}")

    def test_another_dtype_is_the_default_loaders_too(self) -> None:
        self._needs(files=True)
        if not self.lossless:
            pytest.skip("the format rounds numbers by itself")
        model = self.load(self.checkpoint(), dtype="bfloat16").model
        self.check_same(self.parameters(model), self.default_parameters(dtype="bfloat16"))

    def test_a_second_load_gives_the_same(self) -> None:
        first, second = (self.load(self.checkpoint()).model for _ in range(2))
        if parameters_digest(first) != parameters_digest(second):
            fail("two loads of one checkpoint differ")

    def test_Q_05_the_checkpoints_quantisation_is_used(self) -> None:
        self._needs(files=True, free_form=True)
        if self.follows_quantization:
            given = {"quant_method": METHOD}
            folder = self.written("quantised", self.weights(), quantization_config=given)
            found = self.parameters(self.load(folder).model)
        elif self.quantization_by_request:
            found = self.parameters(self.load(self.checkpoint(), quantization=METHOD).model)
        else:
            pytest.skip("the format has a quantisation of its own")
        plain = self.default_parameters()
        twice = {n: 2 * w if n.endswith("_proj.weight") else w for n, w in plain.items()}
        self.check_same(found, twice, "with a quantization_config")

    # -- only what is needed is read ---------------------------------------------------------------

    @_TP
    def test_a_rank_reads_its_own_bytes_and_the_plan_knows_them(self, tp: int) -> None:
        self._needs(files=True, catalogue=True, tp=tp)
        needed, folder = [], self.checkpoint(tp)
        for rank in range(tp):
            result = self.load(folder, tp=tp, rank=rank)
            plan, report = result.plan, result.report
            if plan.bytes_to_read != report.bytes_read:
                fail(f"the plan says {plan.bytes_to_read} bytes, {report.bytes_read} were read")
            kinds = {row.exact for row in plan.rows if row.parameter is not None}
            if kinds != {"exact"}:
                fail(f"rows are {sorted(kinds)}, not exact")
            needed.append(report.bytes_needed)
        whole = self.plan(self.checkpoint()).bytes_needed
        shared = sum(w.nbytes for w in self.weights().values() if w.dim() == 1)
        if sum(needed) > whole + (tp - 1) * shared + whole // 100:
            fail(f"{tp} ranks need {needed} bytes, of {whole} with {shared} that all of them hold")

    def test_a_plan_reads_no_payload(self) -> None:
        self._needs(files=True, catalogue=True)
        folder = self.checkpoint()
        self.plan(folder)  # imports
        before = bytes_asked_for()
        plan = self.plan(folder)
        after = bytes_asked_for()
        if plan.data_read_bytes:
            fail(f"the plan read {plan.data_read_bytes} bytes of data")
        most = plan.bytes_to_read // 4 + self.read_ahead
        if before is not None and after is not None and after - before > most:
            fail(f"the plan read {after - before} bytes; the load will read {plan.bytes_to_read}")

    def test_a_loader_without_a_catalogue_says_so(self) -> None:
        if self.has_catalogue or not self.reads_files:
            pytest.skip("the format has a catalogue")
        notes = {note.code for note in self.plan(self.checkpoint()).notes}
        if "OPAQUE_LOADER" not in notes:
            fail(f"the plan's notes are {sorted(notes)}")

    def test_what_landed_is_told_to_the_progress_bar(self) -> None:
        self._needs(files=True, catalogue=True)
        with landed_bytes() as told:
            report = self.load(self.checkpoint()).report
        if sum(told) != report.bytes_read:
            fail(f"the bar was told of {sum(told)} bytes, {report.bytes_read} were read")

    # -- nothing silent ----------------------------------------------------------------------------

    def test_every_element_is_written_once(self) -> None:
        result = self.load(self.checkpoint())
        if result.report.initialised:
            fail(f"not from the checkpoint: {result.report.initialised}")
        if not self.has_catalogue:
            return
        written: Counter[str] = Counter()
        for row in result.plan.rows:
            if row.parameter is not None and row.target is not None:
                written[row.parameter] += math.prod(row.target.size)
        for name, param in result.model.named_parameters():
            if written[name] != param.numel():
                fail(f"{written[name]} of {param.numel()} elements of {name} are in the plan")

    def test_a_tensor_that_is_missing_is_a_problem(self) -> None:
        weights = self._spoiled()
        del weights[_DOWN]
        plan = self._refused("missing", weights)
        _expect(plan, "MISSING", "layers.1.mlp.down_proj")

    def test_a_tensor_without_a_place_is_a_problem(self) -> None:
        weights = self._spoiled()
        weights[_EXTRA] = weights[_DOWN].clone()
        plan = self._refused("unexpected", weights)
        _expect(plan, "UNEXPECTED", "mystery_proj")

    def test_a_tensor_of_another_shape_is_a_problem(self) -> None:
        weights = self._spoiled()
        weights[_TALL] = torch.cat([weights[_TALL]] * 2)
        plan = self._refused("misshapen", weights)
        _expect(plan, "SHAPE", "o_proj")

    def test_all_problems_are_told_at_once(self) -> None:
        weights = self._spoiled()
        del weights[_DOWN]
        weights[_TALL] = torch.cat([weights[_TALL]] * 2)
        weights[_EXTRA] = weights[_NORM].clone()
        plan = self._refused("three", weights)
        for code, name in (
            ("MISSING", "layers.1.mlp.down_proj"),
            ("SHAPE", "o_proj"),
            ("UNEXPECTED", "mystery_proj"),
        ):
            _expect(plan, code, name)

    # -- errors ------------------------------------------------------------------------------------

    def test_CFG_06_an_option_that_is_unknown_names_the_nearest(self) -> None:
        options = self._loader_class().options
        name = f"{next(iter(options), 'no_such_option')}x"
        config = self.load_config(
            model_loader_extra_config={**self.extra_config, name: 1},
        )
        with pytest.raises(OptionError) as caught:
            self.plan(self.checkpoint(), config=config)
        detail: Any = caught.value.detail
        if detail["accepted"] != sorted(options) or name not in str(caught.value):
            fail(f"the error does not say what is accepted: {caught.value}")
        if options and name[:-1] not in detail["nearest"]:
            fail(f"nearest to {name!r}: {detail['nearest']}")

    def test_CFG_06_an_option_of_another_type_is_refused(self) -> None:
        options = self._loader_class().options
        if not options:
            pytest.skip("the format has no options")
        name = next(iter(options))
        given = {**self.extra_config, name: {"a": object}}
        with pytest.raises(OptionError) as caught:
            self.plan(self.checkpoint(), config=self.load_config(model_loader_extra_config=given))
        if name not in str(caught.value):
            fail(f"the error does not name the option: {caught.value}")

    def test_a_folder_without_weights_is_refused(self) -> None:
        self._needs(files=True)
        weights = self.weights()
        folder = self.folder / "empty"
        write_config(folder, self.config(weights))
        with pytest.raises(LoadkitError) as caught:
            self.plan(folder)
        if not isinstance(caught.value, NoWeightsError):
            fail(f"{type(caught.value).__name__} instead of NoWeightsError: {caught.value}")

    def test_a_damaged_file_is_an_error_of_the_one_shape(self) -> None:
        self._needs(files=True)
        folder = self.copied("damaged")
        self.damage(folder)
        with left_behind(folder) as left, pytest.raises(LoadkitError) as caught:
            self.load(folder)
        error = caught.value
        lacking = [name for name in self.damage_names if getattr(error, name) is None]
        if lacking:
            fail(f"{type(error).__name__} says nothing of {', '.join(lacking)}: {error}")
        if error.file is not None:
            names = {path.name for path in weight_files(folder)}
            if Path(error.file).name not in names:
                fail(f"the error names the file {error.file!r}; there are {sorted(names)}")
        if left.files or left.threads:
            fail(f"after the error: open {left.files}, running {left.threads}")

    # -- nothing stays -----------------------------------------------------------------------------

    def test_a_load_leaves_no_file_open_and_no_thread(self) -> None:
        folder = self.checkpoint()
        self.load(folder)
        gc.collect()
        with left_behind(folder) as left:
            model = self.load(folder).model
            del model  # whose aliased parameters would keep their files open
        if left.files or left.threads:
            fail(f"after a load and its model: open {left.files}, running {left.threads}")

    def test_in_a_process_of_its_own_python_O_gives_the_same_model(self) -> None:
        found = run_child(self._child(self.checkpoint()))
        expected = parameters_digest(self.load(self.checkpoint()).model)
        if found.get("asserts") or found.get("digest") != expected:
            fail(f"another model, or an error: {found}")

    def test_in_a_process_of_its_own_MEM_01_a_load_holds_its_parameters(self) -> None:
        weights = self.weights(vocab=8192, width=512, inner=2048, layers=10)
        folder = self.written("large", weights)
        source = self.checkpoint()
        found = run_child(self._child(folder, warm=str(self.source(source)), alias="never"))
        if "error" in found:
            fail(f"the load failed: {found}")
        most = found["parameter_bytes"] + found["largest"] + self.peak_slack
        if found["peak"] > most:
            fail(f"the load held {found['peak']} bytes; allowed are {most}")

    # -- inside ------------------------------------------------------------------------------------

    def _needs(
        self, *, files: bool = False, catalogue: bool = False, free_form: bool = False,
        own_model: bool = False, tp: int = 1,
    ) -> None:  # fmt: skip
        """Skip what the format does not have."""
        if files and not self.reads_files:
            pytest.skip("the format reads no files")
        if catalogue and not self.has_catalogue:
            pytest.skip("the format has no catalogue: its rows are opaque")
        if free_form and not self.free_form:
            pytest.skip("the format holds whole models only")
        if own_model and self.architecture is not None:
            pytest.skip("the model is not the contract's own")
        if tp not in self.tp_sizes:
            pytest.skip(f"the format is not tried at tp {tp}")

    def _spoiled(self) -> dict[str, torch.Tensor]:
        """Weights to take from, or to add to."""
        self._needs(files=True, free_form=True)
        return self.weights()

    def _refused(self, name: str, weights: dict[str, torch.Tensor]) -> LoadPlan:
        """The plan of a checkpoint that does not fit, which a load refuses too."""
        whole = self.config(self.weights())
        folder = self.written(name, weights, **whole)
        plan = self.plan(folder)
        if plan.ok:
            fail("the plan finds nothing wrong")
        with pytest.raises(PlanError) as caught:
            self.load(folder)
        if len(caught.value.problems) != len(plan.problems):
            fail("the load tells other problems than the plan")
        return plan

    def _loader_class(self) -> Any:
        return tables.loaders.lookup(self.load_format)

    def _child(self, folder: Path, *, warm: str | None = None, **changes: Any) -> dict[str, Any]:
        """What a process of its own is told to load."""
        options = self._options(1, 0, {})
        del options["parallel"]
        config = {
            "load_format": self.load_format,
            "use_tqdm_on_load": False,
            "model_loader_extra_config": dict(self.extra_config),
            **self.load_options,
            **changes,
        }
        source = str(self.source(folder))
        return {"source": source, "warm": warm, "load_config": config, "options": options}


def _expect(plan: LoadPlan, code: str, name: str) -> None:
    """A problem of that kind that names the tensor or the parameter."""
    for problem in plan.problems:
        told = f"{problem.tensor} {problem.parameter} {problem.message}"
        if problem.code.startswith(code) and name in told:
            return
    found = [f"{problem.code}: {problem.message}" for problem in plan.problems]
    fail(f"no problem {code} about {name} among {found}")
