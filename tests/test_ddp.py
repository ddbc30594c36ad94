"""What splits a model before gem sees it, DDP's buckets, per-block compilation and graph breaks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from encoders import Encoder, batch
from observe import assert_near
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemcompile import Report, gem, record

PACKED = {"pack": True, "inner": "eager"}


def reasons(report: Report | dict[str, Any]) -> list[str]:
    """Why padding was declined."""
    assert isinstance(report, Report)
    return [s.reason for s in report.of("padding", "declined")]


# --- DDP on two ranks -----------------------------------------------------------------------------


def worker(rank: int, folder: str) -> None:
    """One step of each kind on one rank; writes what it saw as JSON."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    torch.manual_seed(0)
    model = Encoder(2)
    # Buckets so small that the model is split as a large one is.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    torch.manual_seed(rank)
    example = batch()
    seen: dict[str, Any] = {"eager": step(ddp, ddp, example)}
    for optimize in (True, False):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=optimize), record() as report:
            call = torch.compile(ddp, backend=gem, options=PACKED)
            numbers = step(call, ddp, example)
        packed = [s.details["nodes"] for s in report.of("padding")]
        seen[f"optimize_ddp={optimize}"] = [numbers, packed, report.graphs, reasons(report)]
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    os._exit(0)  # a DDP module's and a gloo group's destructors sometimes wait for each other


def step(call: Any, ddp: nn.Module, example: Any) -> list[float]:
    """Loss and the norms of the gradients, averaged over ranks."""
    ddp.zero_grad()
    loss = call(*example).square().sum()
    loss.backward()
    return [loss.item(), *(float(p.grad.norm()) for p in ddp.parameters())]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(worker, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_buckets_are_the_cause(ranks: list[dict[str, Any]], rank: int) -> None:
    numbers, packed, graphs, why = ranks[rank]["optimize_ddp=True"]
    assert graphs > 1
    assert sum(packed) < sum(ranks[rank]["optimize_ddp=False"][1]) / 2
    assert why and all("DistributedDataParallel splits the graph into buckets" in r for r in why)
    assert all("set torch._dynamo.config.optimize_ddp = False" in r for r in why)
    assert numbers == pytest.approx(ranks[rank]["eager"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_packs_with_the_cure(ranks: list[dict[str, Any]], rank: int) -> None:
    numbers, packed, graphs, why = ranks[rank]["optimize_ddp=False"]
    assert (len(packed), graphs, why) == (1, 1, [])
    assert numbers == pytest.approx(ranks[rank]["eager"], rel=1e-4, abs=1e-4)


# --- one process ----------------------------------------------------------------------------------


def test_block_compiled_alone() -> None:
    def wrap(layer: nn.Module) -> Any:
        return torch.compile(layer, backend=gem, options=PACKED)

    model, example = Encoder(2, wrap=wrap), batch()
    with record() as report:
        y = model(*example)
    model.calls = list(model.layers)
    assert_near(y.detach(), model(*example).detach())
    assert all(s.details["nodes"] < 6 for s in report.of("padding"))  # only keys and values
    assert set(reasons(report)) == {
        "its padded output leaves the graph (the block may be compiled alone); "
        "compile the whole model with its loss, or set padded_outputs='zero'"
    }


def test_block_compiled_alone_packs_with_the_users_word() -> None:
    options = {**PACKED, "padded_outputs": "zero"}
    model = Encoder(2, wrap=lambda layer: torch.compile(layer, backend=gem, options=options))
    example = batch()
    with record() as report:
        y = model(*example)
    model.calls = list(model.layers)
    assert_near(y.detach(), model(*example).detach())
    assert report.of("padding") and not reasons(report)


def test_graph_break_is_named() -> None:
    class Broken(Encoder):
        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            keep = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
            x = self.layers[0](self.embed(ids), keep)
            torch._dynamo.graph_break()
            return self.layers[1](x, keep)[:, 0]

    with record() as report:
        torch.compile(Broken(), backend=gem, options=PACKED)(*batch())
    first = reasons(report)[0]
    assert "its padded output leaves the graph (the graph breaks at test_ddp.py:" in first
    assert "remove the graph break" in first
