"""The digits example with its own training loop: model, layout, planner and trainer, step by step."""

import torch
from digits_vlm import task

import pipeloom as pl


def train(problem: pl.PlanningProblem) -> None:  # runs in every rank's process
    planner = pl.Planner(problem, pl.TcpPlanStore.host)
    model = task.build_model(seed=0)
    trainer = pl.Trainer(model, problem.layout, planner, describe=task.describe, optimizer=torch.optim.AdamW)
    for step in trainer.run(task.batches(num_iterations=10, documents_per_batch=48)):
        if trainer.rank == 0:
            print(f"{step.iteration}: loss {step.loss:.3f}, {step.measured_s * 1e3:.0f} ms, fresh plan: {step.fresh}")


if __name__ == "__main__":
    model, few = task.build_model(seed=0), list(task.batches(num_iterations=4, documents_per_batch=48))
    packing = pl.PackingSpec(token_budget=200)
    modules = {"vision": pl.ModulePlacement(sub_microbatch=24), "lm": pl.ModulePlacement(segments=2)}
    profile = pl.profile_model(model, few, describe=task.describe, packing=packing, placements=modules)
    layout = pl.separate(model.spec, 4, modules, profile.load)
    problem = pl.PlanningProblem.from_profile(model.spec, layout, profile, packing, budget_s=0.1)
    pl.launch(train, 4, problem)
