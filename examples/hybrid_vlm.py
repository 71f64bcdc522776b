"""Plan and train a tiny vision-language model of the Qwen3.5 family on four ranks, and test what it has learned.

Its language model has gated delta nets beside full attention. A sample shows 8 to 40 images of handwritten digits
of four sizes, each followed by its digit. The exit code is 1 if the trained model reads too few held-out digits.
"""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import transformers

import pipeloom as pl

ITERATIONS = 160
GOAL = 0.85
"""Share of held-out digits to read; guessing gives 0.1."""
HELD_OUT = 360
START, IMAGE, END, VIDEO = range(10, 14)  # token ids; 0 to 9 are the digits


def library_model():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": rope}
    delta = {"linear_num_key_heads": 2, "linear_key_head_dim": 16}
    delta |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    # Three layers with gated delta nets and one with attention
    text = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, **heads, **delta}
    patches = {"patch_size": 4, "in_channels": 1, "temporal_patch_size": 1, "num_position_embeddings": 36}
    width = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = transformers.Qwen3_5Config(
        text_config={**text, "initializer_range": 0.1},
        vision_config={**width, **patches, "initializer_range": 0.1},
        vision_start_token_id=START,
        vision_end_token_id=END,
        **tokens,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def build_model():
    return pl.from_transformers(library_model())


@cache
def digits(held_out):
    """Return images of 8 x 8 pixels and their digits."""
    # Read the file of `load_digits` directly, because importing scikit-learn takes seconds in each process.
    file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows = rows[order[:HELD_OUT] if held_out else order[HELD_OUT:]]
    return rows[:, :-1].view(-1, 8, 8) / 8 - 1, rows[:, -1].int().tolist()


def batches():  # every process must produce the same batches
    draw = torch.Generator().manual_seed(0)
    for _ in range(ITERATIONS):
        yield [sample(draw) for _ in range(4)]


def sample(draw, held_out=False):
    """Return a sample as the library's processor does, with labels at the digits."""
    images, answers = digits(held_out)
    ids, pixels, grids = [], [], []
    for number in torch.randint(len(images), (integer(8, 41, draw),), generator=draw).tolist():
        rows, columns = integer(1, 3, draw), integer(1, 3, draw)
        image = images[number].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        # Patches of 4 x 4 pixels. The 2 x 2 patches of a token follow each other.
        pixels.append(image.view(rows, 2, 4, columns, 2, 4).permute(0, 3, 1, 4, 2, 5).reshape(-1, 16))
        grids.append([1, 2 * rows, 2 * columns])
        ids += [START, *[IMAGE] * (rows * columns), END, answers[number]]
    ids = torch.tensor(ids)
    return {
        "input_ids": ids,
        "labels": torch.where(ids < START, ids, -100),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor(grids),
    }


def integer(low, high, draw):
    return int(torch.randint(low, high, (), generator=draw))


@torch.no_grad()
def accuracy(checkpoint):
    """Return the share of held-out digits that the library's own model reads with the trained weights."""
    model = library_model()
    pl.load_weights(checkpoint, pl.from_transformers(model))
    draw = torch.Generator().manual_seed(1)
    right = total = 0
    for _ in range(100):
        held_out = sample(draw, held_out=True)
        labels = held_out.pop("labels")[1:]
        for name in ("input_ids", "mm_token_type_ids"):
            held_out[name] = held_out[name][None]
        right += int((model(**held_out).logits[0, :-1].argmax(-1) == labels).sum())
        total += int((labels >= 0).sum())
    return right / total


def main(folder=None):
    print(pl.emulate(build_model(), next(batches()), cluster="4xH100", pp=4), flush=True)
    config = pl.RunConfig(
        optimizer=pl.OptimizerConfig(5e-3, weight_decay=0.05, betas=(0.9, 0.98), warmup_iterations=15, clip_norm=1.0),
        scheduler=pl.SchedulerConfig("linear"),
        layout=pl.LayoutConfig(4),  # every module over all four ranks
        iterations=ITERATIONS,
    )
    result = pl.fit(build_model, batches, config=config, folder=folder)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, weights in {result.checkpoint}")
    print(f"{result.summary.plans_fresh} of {result.summary.iterations} batches ran on a plan of their own")
    found = accuracy(result.checkpoint)
    print(f"{100 * found:.1f} % of held-out digits read, at least {100 * GOAL:.0f} % wanted")
    return found


if __name__ == "__main__":
    sys.exit(main() < GOAL)
