"""Run PyTorch's pipeline stages with a plan for each step: torchrun --nproc-per-node 2 examples/torch_pipelining.py.

Only the lines marked (*) differ from a script with ``ScheduleInterleaved1F1B``. ``--theirs`` runs that schedule.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from pipeloom.integrations.pipelining import PlannedSchedule  # (*)

WIDTH, STAGES, MICROBATCHES = 64, 4, 8


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.wide(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def main(theirs: bool, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    layers = [Stage() for _ in range(STAGES)]
    mine = [number for number in range(STAGES) if number % (last + 1) == rank]
    stages = [PipelineStage(layers[number], number, STAGES, torch.device("cpu")) for number in mine]
    if theirs:
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=loss)
    else:
        schedule = PlannedSchedule(stages, n_microbatches=MICROBATCHES, loss_fn=loss)  # (*)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        inputs = torch.randn(2 * MICROBATCHES, 32, WIDTH)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([inputs] if rank == 0 else []), target=inputs.flip(1) if rank == last else None, losses=losses)
        optimizer.step()
        if rank == last:
            print(f"step {step}: loss {sum(map(float, losses)) / len(losses):.4f}", flush=True)
    if not theirs:
        lengths(schedule, rank, last)
        schedule.close()
    dist.destroy_process_group()


def lengths(schedule: PlannedSchedule, rank: int, last: int) -> None:
    """Vary the number and the lengths of microbatches per step, which PyTorch's runtime does not support."""
    for step in range(3):
        torch.manual_seed(step)
        batch = [torch.randn(1, int(n), WIDTH) for n in torch.randint(8, 65, (3 + step,))]
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[(x,) for x in batch] if rank == 0 else None,
            target_mbs=[x.flip(1) for x in batch] if rank == last else None,
            losses=losses,
        )
        if rank == last:
            print(
                f"lengths {[x.shape[1] for x in batch]}: loss {sum(map(float, losses)) / len(losses):.4f}", flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theirs", action="store_true", help="run ScheduleInterleaved1F1B instead")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    main(given.theirs, given.steps)
