"""The first sample of a training run, checked and shown before training."""

from __future__ import annotations

import logging

from pipeloom.runtime import Batches, user_code
from pipeloom.runtime.data.dataset import CorruptSampleError
from pipeloom.training.job import Job

_LOG = logging.getLogger(__name__)


def show_first_sample(job: Job) -> None:
    """Check a sample of the first batch against its source, and print and log it with its targets marked.

    Raises
    ------
    InputError
        If the sample differs from its source.
    """
    batches, _ = job.task.batches_from(0, job.config.iterations, **job.config.data)
    if not isinstance(batches, Batches):
        return
    for _, index in batches.members(0):
        try:
            with user_code(f"dataset.preview({index})"):
                text = batches.dataset.preview(index)
        except CorruptSampleError:
            # Reading the batch reports it.
            continue
        if text:
            shown = f"First sample, with its targets between >>> and <<<: {text}"
            job.display.say(shown)
            _LOG.info(shown)
        return
