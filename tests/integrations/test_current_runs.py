"""What somebody runs now: words, a file of ours, torchtitan's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.models import load_model
from pipeloom.spec import ChunkStrategy

EXAMPLES = Path(__file__).parents[2] / "examples" / "compare"


def test_words_and_files_say_the_same(tmp_path: Path) -> None:
    said = load_run("tp=2 pp=2 layout=4,8,8,8 recompute=full:0.5 microbatch_samples=2 pad_to=4096 zero=3")
    file = tmp_path / "now.toml"
    file.write_text(
        '[now]\ntp = 2\npp = 2\nlayout = [4, 8, 8, 8]\nrecompute = "full:0.5"\n'
        "microbatch_samples = 2\npad_to = 4096\nzero = 3\n"
    )
    read = load_run(str(file))
    assert (read.source, said.source) == (str(file), "words")
    for name in set(said.__struct_fields__) - {"source"}:
        assert getattr(said, name) == getattr(read, name)
    assert (said.order, said.num_chunks) == ("interleaved", 2)
    assert said.strategy == ChunkStrategy("recompute", 0.5)
    degrees = said.degrees(16)
    assert (degrees.tensor, degrees.pipeline, degrees.data, degrees.zero) == (2, 2, 4, 3)
    assert load_run("pp=4 recompute=none").strategy == ChunkStrategy("keep")
    assert load_run("pp=4").strategy is None


def test_the_examples() -> None:
    run = load_run(str(EXAMPLES / "now.toml"))
    assert (run.layout, run.order) == ((4, 8, 8, 8), "1f1b")
    titan = load_run(str(EXAMPLES / "torchtitan.toml"))
    assert (titan.pp, titan.order, titan.recompute, titan.dp) == (4, "1f1b", "full", None)
    assert (titan.microbatch_tokens, titan.microbatches) == (8192, 8)
    assert titan.notes


def test_torchtitan_names_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text(
        "[parallelism]\npipeline_parallel_degree = 2\ntensor_parallel_degree = 4\ndata_parallel_shard_degree = 2\n"
        'data_parallel_replicate_degree = 3\nfsdp_reshard_after_forward = "always"\n'
        'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], '
        '["norm", "output"]]\n'
    )
    run = load_run(str(file))
    assert (run.layout, run.num_chunks, run.order) == ((1, 2, 1, 0), 2, "interleaved")
    assert (run.tp, run.dp, run.zero, run.recompute) == (4, 6, 3, "selective")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nofile.toml", "is neither a file nor words; write 'tp=2"),
        ("tp=2 pp", "'pp' is not name=value"),
        ("tp=2 tp=4", "tp is given twice"),
        ("tp=two", "tp: .two. is not an integer"),
        ("pp=0", "pp: 0 is below 1"),
        ("color=red", r"color: is no field of a run; fields are tp, pp"),
        ("pp=4 schedule=zb", "schedule: .zb. is not one of '1f1b', 'gpipe', 'interleaved', 'zero_bubble'"),
        ("pp=4 recompute=some", "recompute: .some. is not a kind of recomputation"),
        ("pp=4 layout=1,2,3", "layout: has 3 stages, not a multiple of pp = 4"),
        ("pp=2 schedule=1f1b chunks=2", "schedule: '1f1b' takes one stage a rank, here are 2; use 'interleaved'"),
        ("pp=2 group=4", "group: 4 microbatches, with schedule '1f1b' on pp = 2 ranks; leave it out"),
        ("pp=4 chunks=2 group=2", "group: 2 microbatches, with schedule 'interleaved' on pp = 4 ranks"),
        ("pp=2 layout=1,2,3,4 chunks=1", "chunks: 1 a rank, layout has 4 stages"),
        ("microbatch_samples=1 microbatch_tokens=5", "is given beside microbatch_samples"),
        ("\0=1", "is no field|not name=value"),
    ],
)
def test_what_is_no_run_is_named(given: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        load_run(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nname = 1", r"has no table \[now\]"),
        ("now = 3", r"now: is not a table"),
        ("a =", "is not TOML"),
        ('[parallelism]\npipeline_parallel_degree = "4"', "parallelism.pipeline_parallel_degree: '4' is not supported"),
        (
            '[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "DualPipeV"',
            "'DualPipeV' is not supported; choose from gpipe, 1f1b, interleaved1f1b",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 4",
            "give module_fqns_per_model_part instead",
        ),
        ('[training]\n[activation_checkpoint]\nmode = "memory_budget"', "choose from none, selective, full"),
        ("[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [[1]]", "give a list of names"),
    ],
)
def test_what_is_no_file_of_a_run_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=words) as refused:
        load_run(str(file))
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "config.json",
            '{"model_type": "llama", "num_hidden_layers": 8}',
            "a Hugging Face configuration, which describes",
        ),
        ("model_index.json", '{"_class_name": "Flux"}', "a configuration of the diffusers library, which describes"),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "a file of DeepSpeed"),
        ("plan.json", '{"tp_size": 1, "pp_size": 4}', "a file of SimuMax"),
        ("any.json", "[1, 2]", "JSON, but no description of a run"),
        ("cut.json", "{", "JSON, but no description of a run"),
        ("recipe.yaml", "model:\n  _target_: nemo_automodel.Model\n  num_layers: 4\n", "of NeMo Automodel"),
        ("loong.yaml", "HOME: $LOONGFORGE_PATH/configs\nnum_layers: 4\n", "a file of LoongForge"),
        ("search.yaml", "search_engine:\n  model_info: {num_layers: 4}\n", "a file of Galvatron"),
        ("accelerate.yaml", "compute_environment: LOCAL_MACHINE\n", "a file of Accelerate"),
        ("schedule.csv", "0F0,0F1\n", "a table of comma-separated values"),
        ("registry.py", "num_layers = 4\n", "a Python file, which is not run"),
    ],
)
def test_files_of_other_programs_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name}: is .*{words}.*; it reads words \(.*torchtitan") as refused:
        load_run(str(tmp_path / name))
    assert "Megatron" in refused.value.remedy
    if "which describes" not in words and not name.startswith(("any", "cut")):
        with pytest.raises(InputError, match=rf"{name}: is .*{words}; give a name, a Hugging Face"):
            load_model(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("other.yaml", "optimizer: {lr: 1}\n", "has neither num_layers nor hidden_size"),
        ("run.sh", "python3 search_dist.py\n", "`python3 search_dist.py` has no argument of Megatron"),
        ("notes.txt", "Train on Monday.\n", "has no command that starts Megatron"),
    ],
)
@pytest.mark.parametrize("load", [load_run, load_model])
def test_what_is_no_run_of_megatron_is_said_by_its_reader(load, name, text, words, tmp_path: Path) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words) as refused:
        load(str(tmp_path / name))
    assert name in refused.value.entity


SIZES = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1000 "
    "--pipeline-model-parallel-size 2 --bf16 --micro-batch-size 2 --global-batch-size 16"
)


@pytest.mark.parametrize("source", ["source common.sh", '. "$(dirname "$0")/common.sh"'])
def test_a_script_that_sources_its_arguments_is_a_run(source: str, tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text(f"ARGS=(--num-layers 8 {SIZES})\n")
    script = tmp_path / "train.sh"
    script.write_text(source + '\ntorchrun pretrain_gpt.py "${ARGS[@]}"\n')
    assert load_run(str(script)).layout == (4, 4)
    assert load_model(str(script)).modules[0].flat_layers[0].vocabulary == 1024


def test_a_hybrid_model_without_a_number_of_layers_is_a_run(tmp_path: Path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(f"--hybrid-layer-pattern 'M-M-|M*M-' {SIZES}")
    assert load_run(str(file)).layout == (4, 4)
    assert len(load_model(str(file)).modules[0].flat_layers) == 10


def test_a_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; it reads words"):
        load_run(str(tmp_path))


def test_tables_beside_now_are_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[now]\npp = 4\n[training]\nseq_len = 4096\n")
    with pytest.raises(InputError, match=r"training: is beside \[now\], and not read; leave it out"):
        load_run(str(tmp_path / "run.toml"))


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(InputError, match=r"model 'llama-3.1-8b': has no trainable module"):
        load_model("llama-3.1-8b", ["lm"])
    with pytest.raises(InputError, match="has no trainable module"):
        load_model("qwen2.5-vl-3b", ["lm", "vision"])
    assert load_model("qwen2.5-vl-3b", ["lm"]).modules[-1].frozen


def test_megatron_without_sequence_parallelism_is_noted(tmp_path: Path) -> None:
    text = (
        "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--vocab-size 1000 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --bf16 "
        "--micro-batch-size 2 --global-batch-size 16"
    )
    (tmp_path / "a.txt").write_text(text)
    assert any("sequence parallelism is emulated" in note for note in load_run(str(tmp_path / "a.txt"), 4).notes)
    (tmp_path / "a.txt").write_text(f"{text} --sequence-parallel")
    assert not any("sequence parallelism" in note for note in load_run(str(tmp_path / "a.txt"), 4).notes)


def test_megatron_divides_each_expert_as_it_divides_dense_layers(tmp_path: Path) -> None:
    text = (
        "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--vocab-size 1000 --tensor-model-parallel-size 2 --sequence-parallel --bf16 --micro-batch-size 2 "
        "--global-batch-size 16 --pipeline-model-parallel-size 2 --num-experts 8 --moe-ffn-hidden-size 128 "
        "--expert-model-parallel-size 4"
    )
    (tmp_path / "a.txt").write_text(text)
    run = load_run(str(tmp_path / "a.txt"), 16)
    assert (run.ep, run.etp, run.degrees(16).expert_tensor) == (4, 2, 2)
    (tmp_path / "a.txt").write_text(f"{text} --expert-tensor-parallel-size 1")
    assert load_run(str(tmp_path / "a.txt"), 16).degrees(16).expert_tensor == 1


def test_a_file_of_megatron(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--vocab-size 1000 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttt|tt|tL --bf16 "
        "--micro-batch-size 2 --global-batch-size 16 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1\n"
    )
    run = load_run(str(file), 4)
    assert (run.layout, run.pp, run.dp, run.order) == ((2, 3, 2, 1), 2, 2, "interleaved")
    assert (run.microbatch_tokens, run.microbatches, run.recompute) == (1024, 4, "full:0.5")
    assert (run.group, run.notes[-1:]) == (
        2,
        ("recomputing 1 layers a virtual stage is emulated as recompute=full:0.5",),
    )
    assert len(load_model(str(file)).modules) == 1
    file.write_text(file.read_text().replace("--bf16", "--bf16 --microbatch-group-size-per-virtual-pipeline-stage 4"))
    assert load_run(str(file), 4).group == 4


def test_published_models_have_many_spellings() -> None:
    names = ("Qwen2.5-VL-7B", "qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct")
    assert len({load_model(name) for name in names}) == 1
    with pytest.raises(InputError, match=r"model 'Qwen2.5-VL-77B': is unknown; did you mean .*qwen2.5-vl-72b.*config"):
        load_model("Qwen2.5-VL-77B")
    with pytest.raises(InputError, match=r"model 'Zzz9': is unknown; known are .*qwen2.5-vl-7b.*vlm-m.*config"):
        load_model("Zzz9")
