import random

from pipeloom.spec import Batch
from pipeloom.tuning import TuningSpec, tune, tune_replicas
from tests.cases import random_batch
from tests.tuning.test_tune import BUDGET, make


def test_the_slowest_replica_is_hardly_slower_than_the_fastest_and_faster_than_assigned_by_chance() -> None:
    pipeline, _ = make(3, False)
    spec = TuningSpec(effort=0.3)
    ratios, gains = [], []
    for seed in range(5):
        batch = random_batch(seed, num_samples=90)
        replicas = tune_replicas(pipeline, batch, 3, BUDGET, spec, seed)
        assert sorted(i for replica in replicas for i in replica.members) == list(range(90))
        for replica in replicas:
            assert [s.id for s in replica.batch.samples] == [batch.samples[i].id for i in replica.members]
        times = [replica.tuned.planned_ns for replica in replicas]
        ratios.append(max(times) / min(times))
        order = random.Random(seed).sample(range(90), 90)
        chance = [Batch(tuple(batch.samples[i] for i in order[k::3])) for k in range(3)]
        gains.append(max(tune(pipeline, b, BUDGET, spec, seed).planned_ns for b in chance) / max(times))
    assert sum(ratios) / len(ratios) < 1.03
    assert sum(gains) / len(gains) > 1.05


def test_one_replica_is_the_batch_itself() -> None:
    pipeline, _ = make(2, True)
    batch = random_batch(4, num_samples=20)
    (alone,) = tune_replicas(pipeline, batch, 1, BUDGET)
    assert alone.tuned.planned_ns == tune(pipeline, batch, BUDGET).planned_ns
