"""A small mixture of experts trained by Lightning on planned microbatches, routes replayed; on CPU processes.

    python examples/lightning_moe.py --ranks 2

Every epoch is one window of rollouts and one optimizer step. The losses are those of one process, whatever --ranks says.
"""

import argparse
import json
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional

import routepack as rp
from routepack.integrations.lightning import RolloutDataModule, RoutePackCallback

VOCABULARY, LAYERS, EXPERTS, TOP_K, DIM = 64, 2, 8, 2, 32


class MoE(nn.Module):
    """Top-k experts; a row of *replayed_nK* that is not -1 says which, the live scores say how much of each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM**0.5)

    def forward(self, x_nD: Tensor, replayed_nK: Tensor) -> Tensor:
        score_nE = self.router(x_nD)
        chosen_nK = torch.where(replayed_nK < 0, score_nE.topk(TOP_K).indices, replayed_nK)
        gate_nK = score_nE.gather(1, chosen_nK).softmax(dim=1)
        gate_nE = torch.zeros_like(score_nE).scatter(1, chosen_nK, gate_nK)
        return x_nD + functional.silu(torch.einsum("nd,edf,ne->nf", x_nD, self.experts, gate_nE))


class Policy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(MoE() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x_nD = self.embedding(batch["token_ids"])
        for layer, moe in enumerate(self.layers):
            x_nD = moe(x_nD, batch["routed_experts"][:, layer].long())
        loss_n = functional.cross_entropy(self.head(x_nD), batch["targets"], reduction="none")
        # Summed, then scaled: the mean over the window's trained tokens, however they were packed.
        loss = (loss_n * batch["loss_mask"]).sum() * batch["loss_scale"]
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        self.seen[-1] += batch["sequences"].tolist()
        return loss

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if trainer.is_global_zero:
            print(f"window {trainer.current_epoch}: loss {self.losses[-1]:.4f}")


def main(ranks: int, epochs: int, out: Path) -> None:
    # Small windows need no worker processes, and CPUs no advice on GPUs.
    warnings.filterwarnings("ignore", module="lightning")
    pl.seed_everything(0, verbose=False)
    shape = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K, "vocab_size": VOCABULARY}
    windows = [rp.testing.synthetic_batch(num_sequences=48, max_length=96, seed=seed, **shape) for seed in range(2)]
    planner = rp.Planner(
        topology=rp.Topology(data_parallel_degree=ranks, expert_parallel_degree=1),
        rerouter=rp.IdentityRerouter(),  # Lightning moves no experts.
        packer=rp.AttentionAwarePacker(max_tokens=256),
        num_proposals=20_000,
    )
    losses, policy = Losses(), Policy()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[RoutePackCallback(planner), losses],
        logger=CSVLogger(out, name="logs", version=ranks),
        use_distributed_sampler=False,  # The plan deals sequences to ranks.
        reload_dataloaders_every_n_epochs=1,  # Every epoch is a window with a plan of its own.
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(policy, datamodule=RolloutDataModule(windows))
    report = {"losses": losses.losses, "seen": policy.seen, "steps": trainer.global_step}
    (out / f"ranks{ranks}_rank{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes")
    parser.add_argument("--epochs", type=int, default=4, help="windows to train")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder for logs and losses")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    main(given.ranks, given.epochs, given.out)
