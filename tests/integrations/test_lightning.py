import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from routepack import testing
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.rerouter import IdentityRerouter
from routepack.core.errors import ConfigError, InfeasibleError, TraceError
from routepack.core.plans import Topology
from routepack.microbatches.materialize import microbatches
from routepack.planning.planner import Planner

with warnings.catch_warnings():
    # Lightning imports what its own dependencies deprecate.
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

    from routepack.integrations import lightning as planned

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def planner_of(*, ranks=1, rerouter=None, cap=256, **options):
    return Planner(
        topology=Topology(data_parallel_degree=ranks, expert_parallel_degree=1),
        packer=AttentionAwarePacker(max_tokens=cap),
        rerouter=rerouter or IdentityRerouter(),
        num_proposals=500,
        **options,
    )


@pytest.fixture
def window():
    return testing.synthetic_batch(num_sequences=24, max_length=96, num_experts=8, num_layers=2, vocab_size=32)


class Bigram(pl.LightningModule):
    """Next-token logits from the fed token: all that a loss needs to be told apart by sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(32, 32)
        self.seen, self.steps = [], []

    def training_step(self, batch, batch_idx):
        loss_n = torch.nn.functional.cross_entropy(self.table(batch["token_ids"]), batch["targets"], reduction="none")
        loss = (loss_n * batch["loss_mask"]).sum() * batch["loss_scale"]
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)
        self.seen += batch["sequences"].tolist()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.table.weight.grad.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kept(pl.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))


def trainer_of(callbacks, *, logger=False, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    given = {"max_epochs": 1, "reload_dataloaders_every_n_epochs": 1, "accelerator": "cpu", "devices": 1} | quiet | options
    return pl.Trainer(callbacks=callbacks, logger=logger, **given)


def test_ranks_deal_every_sequence_once(window):
    plan = planner_of(ranks=3).plan(window)
    samplers = [planned.PlannedBatchSampler(plan, rank) for rank in range(3)]
    assert {len(sampler) for sampler in samplers} == {plan.num_microbatches}
    dealt = [s for sampler in samplers for cell in sampler for s in cell]
    assert sorted(dealt) == list(range(window.num_sequences))
    with pytest.raises(ConfigError, match="rank=3"):
        planned.PlannedBatchSampler(plan, 3)


def test_a_microbatch_is_the_one_that_torchtitan_would_get(window):
    plan = planner_of(ranks=2).plan(window)
    dataset = planned.RolloutDataset(window)
    for cell, expected in zip(planned.PlannedBatchSampler(plan, 1), microbatches(plan, window, 1), strict=True):
        got = dataset.__getitems__(cell)
        for name, value in (
            ("token_ids", expected.token_ids_n),
            ("positions", expected.positions_n),
            ("targets", expected.targets_n),
            ("cu_seqlens", expected.cu_seqlens),
            ("routed_experts", expected.routed_experts_nLK),
            ("advantages", expected.fields["advantages"]),
            ("loss_mask", expected.fields["loss_mask"]),
        ):
            np.testing.assert_array_equal(got[name].numpy(), value)


def test_an_epoch_is_one_step_with_the_gradient_of_the_whole_window(window):
    module, callback = Bigram(), planned.RoutePackCallback(planner_of())
    reference = Bigram()
    trainer_of([callback]).fit(module, datamodule=planned.RolloutDataModule([window]))
    ids, ends = torch.from_numpy(window.token_fields["token_ids"]), window.cu_tokens
    fed = np.concatenate([np.arange(start, end - 1) for start, end in pairwise(ends)])
    torch.nn.functional.cross_entropy(reference.table(ids[fed]), ids[fed + 1]).backward()
    assert callback.plan.num_microbatches > 1
    assert sorted(module.seen) == list(range(window.num_sequences))
    assert len(module.steps) == 1
    torch.testing.assert_close(module.steps[0], reference.table.weight.grad)


def test_a_mask_weighs_its_tokens_over_the_window(window):
    mask = np.random.default_rng(0).random(len(window.token_fields["loss_mask"])) < 0.3
    masked = replace(window, token_fields={**window.token_fields, "loss_mask": mask})
    module, reference = Bigram(), Bigram()
    trainer_of([planned.RoutePackCallback(planner_of())]).fit(module, datamodule=planned.RolloutDataModule([masked]))
    ids, targets = torch.from_numpy(window.token_fields["token_ids"]), np.flatnonzero(mask)
    targets = np.setdiff1d(targets, window.cu_tokens[:-1])
    torch.nn.functional.cross_entropy(reference.table(ids[targets - 1]), ids[targets]).backward()
    torch.testing.assert_close(module.steps[0], reference.table.weight.grad)


def test_every_window_is_planned_and_logged(window):
    others = [
        testing.synthetic_batch(num_sequences=20, max_length=96, num_experts=8, num_layers=2, vocab_size=32, seed=s)
        for s in (1, 2)
    ]
    windows, logger = [window, *others], Kept()
    callback, planner = planned.RoutePackCallback(planner_of()), planner_of()
    trainer = trainer_of([callback], logger=logger, max_epochs=4)
    trainer.fit(Bigram(), datamodule=planned.RolloutDataModule(windows))
    told = [(step, metrics["plan/value"]) for step, metrics in logger.metrics if "plan/value" in metrics]
    assert told == [(epoch, planner.plan(windows[epoch % 3]).value) for epoch in range(4)]
    assert all("plan/exposed_ms" in metrics for _, metrics in logger.metrics if "plan/value" in metrics)
    assert trainer.global_step == 4
    assert trainer.accumulate_grad_batches == 1


def test_windows_can_come_from_a_rollout_engine(window):
    asked = []

    def engine(epoch):
        asked.append(epoch)
        return window

    module = Bigram()
    trainer_of([planned.RoutePackCallback(planner_of())], max_epochs=2).fit(
        module, datamodule=planned.RolloutDataModule(engine)
    )
    assert asked == [0, 1]
    assert sorted(module.seen) == sorted(2 * list(range(window.num_sequences)))


def test_placement_stays_as_it_is(window):
    callback = planned.RoutePackCallback(planner_of())
    trainer_of([callback]).fit(Bigram(), datamodule=planned.RolloutDataModule([window]))
    assert (callback.plan.placement.physical_to_logical_LP == np.arange(8)).all()


@pytest.mark.parametrize(
    ("planner", "options", "message"),
    [
        ({"rerouter": ExpertRerouter()}, {}, "would move experts, which Lightning does not"),
        ({"ranks": 2}, {}, "data_parallel_degree=2 is not the Trainer's 1"),
        ({}, {"reload_dataloaders_every_n_epochs": 0}, "an epoch is a window"),
        ({}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches"),
        ({}, {"limit_train_batches": 2}, "limit_train_batches"),
        ({}, {"fast_dev_run": True}, "fast_dev_run"),
    ],
)
def test_options_that_do_not_go_together_are_named(window, planner, options, message):
    trainer = trainer_of([planned.RoutePackCallback(planner_of(**planner))], **options)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Bigram(), datamodule=planned.RolloutDataModule([window]))


def test_a_data_module_without_the_callback_says_so(window):
    with pytest.raises(ConfigError, match="one RoutePackCallback"):
        trainer_of([]).fit(Bigram(), datamodule=planned.RolloutDataModule([window]))


def test_a_window_that_cannot_be_planned_stops_the_fit(window):
    trainer = trainer_of([planned.RoutePackCallback(planner_of(cap=8))])
    with pytest.raises(InfeasibleError, match="max_tokens=8"):
        trainer.fit(Bigram(), datamodule=planned.RolloutDataModule([window]))


def test_a_window_that_trains_nothing_is_refused(window):
    nothing = np.zeros(len(window.token_fields["loss_mask"]), dtype=bool)
    with pytest.raises(TraceError, match="no trained token"):
        planned.trained_tokens(replace(window, token_fields={**window.token_fields, "loss_mask": nothing}))
    with pytest.raises(ConfigError, match="windows is empty"):
        planned.RolloutDataModule([])


@pytest.mark.slow
def test_the_example_on_two_processes_trains_as_on_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for ranks in (1, 2):
        command = [sys.executable, str(ROOT / "examples/lightning_moe.py"), "--ranks", str(ranks), "--out", str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert run.returncode == 0, run.stderr
    alone, first, second = (json.loads((tmp_path / name).read_text()) for name in
                            ("ranks1_rank0.json", "ranks2_rank0.json", "ranks2_rank1.json"))  # fmt: skip
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["losses"] == second["losses"]
    assert len(set(alone["losses"])) == alone["steps"] == 4
    for epoch in range(4):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == list(range(48))
        assert first["seen"][epoch]
        assert second["seen"][epoch]
