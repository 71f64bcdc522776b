"""Megatron's launch scripts are read as bash runs them; checked against bash itself."""

from __future__ import annotations

import random
import subprocess
import textwrap

import pytest

from pipeloom.emulator import module_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.megatron import read_megatron
from pipeloom.integrations.megatron.files import read_arguments
from pipeloom.integrations.megatron.launches import launches
from tests.integrations.megatron.scripts import Generator, agrees, passed_by_bash, passed_by_us

REST = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --global-batch-size 32 "
    "--vocab-size 32000 --bf16 --position-embedding-type rope --pipeline-model-parallel-size 4"
)
EIGHT_LAYERS = 133_539_840
"""Parameters with 8 layers."""


def written(folder, text, name="train.sh"):
    file = folder / name
    file.write_text(textwrap.dedent(text).lstrip().replace("REST", REST))
    return file


def read(folder, text, name="train.sh"):
    return read_megatron(written(folder, text, name), default_devices=8)


def parameters(run):
    return sum(module_parameters(run.architecture).values())


# ------------------------------------------------------------------ compared with bash


def compare(seeds, folder):
    """Every script whose values are known is read, and as bash runs it; returns how many were compared."""
    compared = 0
    for seed in seeds:
        script = Generator(seed).script()
        try:
            theirs = passed_by_bash(script, folder)
        except subprocess.TimeoutExpired:
            continue
        for ours in passed_by_us(script):
            assert ours == theirs, (seed, script)
        compared += 1
    return compared


def compare_unknown(seeds, folder):
    """Whatever commands print and return: what bash passes is on one of the ways that were found."""
    compared = 0
    for seed in seeds:
        chance = random.Random(seed)
        script = Generator(seed, probing=True).script()
        probes = f"probe() {{ echo {chance.choice([2, 5, 7])}; }}; probe_status() {{ return {chance.choice([0, 1])}; }}"
        try:
            theirs = passed_by_bash(script, folder, probes)
            ways = passed_by_us(script)
        except (subprocess.TimeoutExpired, InputError):
            continue
        assert any(agrees(ours, theirs) for ours in ways), (seed, script)
        compared += 1
    return compared


def test_random_scripts_pass_what_bash_passes(tmp_path):
    assert compare(range(25), tmp_path) >= 24
    assert compare_unknown(range(15), tmp_path) >= 14


@pytest.mark.full
def test_many_random_scripts_pass_what_bash_passes(tmp_path):
    assert compare(range(1000, 2050), tmp_path) >= 1000
    assert compare_unknown(range(1000, 1300), tmp_path) >= 280


@pytest.mark.parametrize(
    "script",
    [
        "false; s=$?; torchrun $s; x=$(false) y=$?; torchrun $? $y",
        "x=7b; case $x in [[:digit:]]*) torchrun 1;; *) torchrun 2;; esac; torchrun ${x#[[:digit:]]} ${x//[0-9]b/y}",
        "x=abc y=; torchrun ${x/#/pre} ${x/%/post} ${x//} ${y/*/Z} ${x%%b*} ${x##*[!c]} ${x/[b-]/-}",
        "c=(4 5 6) a=1; torchrun $((c[a++] + 10)) $a $((a = a > 1 ? c[0] : 2)) $((-2 ** 2)) $((1 || (a = 9))) $a",
        "a=a; ((a)); torchrun $?; b=(5 b); torchrun $((b[1]))",
        'x=$(cat <<E\na \\"b\\" \\$x\nE\n)\ntorchrun "$x"',
        "read -r -d '' A <<'E'\n --x 1\n--y \\2\nE\ntorchrun $? $A; torchrun \"$A\"",
        "read -rd '' a b <<E; torchrun $b\n1 2\n3\nE\nIFS= read -r -d '' c <<'E'\n x\n\nE\ntorchrun \"$c\" \"$a\"",
        "IFS=$'\\n' read -d '' -ra L <<'E'\na b\nc\nE\ntorchrun $? \"${L[@]}\"; read A <<E\n1 2\n3\nE\ntorchrun $A",
        "[ ! = = 3 ]; torchrun $?; [ a -a '' -o b ]; torchrun $?; [ a b ]; torchrun $?; [ ]; torchrun $?",
        "exec 3>&1; torchrun 1; exec 2>/dev/null; torchrun 2; exec 3>&- 4</dev/null; torchrun 3",
        "set -a; x=5 z=(7); set +a; y=6; bash -c 'torchrun ${x:-1} ${y:-1} ${z:-1}'",
        "set -o allexport; x=2; set +o allexport; x=3 y=4; bash -c 'torchrun $x $y'",
        "set -a; f() { torchrun $x $1; }; read x <<< 3; set +a; y=4; bash -c 'f $y'",
        "f() { torchrun $1; }; g() { f 4; }; export -f f; bash -c 'f 3; g'; bash -c 'f 5'",
        '[[ ! ( a == b || c < d ) ]]; torchrun $?; [[ ab =~ ^(a)(b)$ ]] && torchrun "${BASH_REMATCH[@]}"',
    ],
)
def test_details_are_those_of_bash(tmp_path, script):
    assert passed_by_us(script) == [passed_by_bash(script, tmp_path)]


# ------------------------------------------------------------------ what runs, and what does not


@pytest.mark.parametrize(
    "script",
    [
        """
        SIZE=${1:-"small"}
        case "$SIZE" in
            small)
                NUM_LAYERS=8
                ;;
            large)
                NUM_LAYERS=32
                ;;
        esac
        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $NUM_LAYERS REST
        """,
        """
        NL=8
        [ "$BIG" = 1 ] && NL=32
        torchrun pretrain_gpt.py --num-layers $NL REST
        """,
        """
        NL=8
        if [[ -n "$BIG" ]]; then NL=32; elif (( NL > 9 )); then NL=31; fi
        torchrun pretrain_gpt.py --num-layers $NL REST
        """,
        """
        OLD=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
        torchrun pretrain_gpt.py --num-layers 8 REST
        """,
        """
        DENSE=2
        SPARSE=6
        ARGS=(
            --num-layers $((DENSE + SPARSE))
            REST
        )
        torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}
        """,
        "torchrun pretrain_gpt.py --num-layers ${NL:=8} REST",
        'torchrun pretrain_gpt.py --num-layers 8 --wandb-exp-name "run #3" REST',
        """
        mkdir --parents logs
        pip install --quiet -r requirements.txt
        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 REST
        """,
        """
        usage() {
            echo "--size: model size"
            exit 1
        }
        while [[ $# -gt 0 ]]; do case $1 in --layers) NL=$2; shift 2;; *) usage;; esac; done
        torchrun pretrain_gpt.py --num-layers 8 REST
        """,
        """
        NLAYERS=8
        for ((i=0; i<NLAYERS; i++)); do freq+=(0); done
        printf -v LIST "[%s]" "$(IFS=', '; echo "${freq[*]}")"
        ray stop --force
        ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --num-layers ${#freq[@]} REST
        """,
        """
        OPTIONS="--num-layers 8 \\
            REST"
        run_cmd="python -u pretrain_gpt.py ${OPTIONS}"
        srun -l --output=logs/%x.log sh -c "${run_cmd}"
        """,
        "set -euo pipefail\nexport NL=8\nbash -c 'torchrun pretrain_gpt.py --num-layers $NL REST'",
        """
        if [ -f checkpoints/latest.txt ]; then LOAD="--load checkpoints"; else LOAD=""; fi
        NVLINK=$(nvidia-smi topo -m | grep -c NV)
        if [ "$NVLINK" -gt 0 ]; then export NCCL_NVLS_ENABLE=1; fi
        cd /workspace || exit 1
        torchrun --rdzv-id $(date +%s) -m training.pretrain_gpt --num-layers 8 $LOAD --save /out/$(hostname) REST
        """,
        """
        until torchrun --max-restarts 3 pretrain_gpt.py --num-layers 8 REST "$@"; do sleep 5; done
        """,
        """
        while true; do
            torchrun pretrain_gpt.py --num-layers 8 REST
            sleep 5
        done
        """,
        """
        exec > >(tee -a "$LOG") 2>&1
        torchrun --standalone --nproc_per_node=gpu pretrain_gpt.py --num-layers 8 REST
        """,
        """
        sbatch --nodes 4 <<EOF
        #!/bin/bash
        srun torchrun --nnodes 1:4 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 REST
        EOF
        """,
        'sbatch --nodes 4 --wrap "srun torchrun pretrain_gpt.py --num-layers 8 REST"',
        'sbatch --wrap="srun torchrun pretrain_gpt.py --num-layers 8 REST" --nodes 4',
        """
        launch() { torchrun pretrain_gpt.py --num-layers $NL REST; }
        export -f launch
        set -a
        NL=8
        set +a
        srun bash -c launch
        """,
        """
        uv run --extra ssm python -m torch.distributed.run --nproc-per-node 8 \\
          --log-dir "${PWD}/logs/$(date +%Y)-$$" -m examples.pretrain --num-layers 8 REST 2>&1 | tee "$LOG"
        """,
    ],
)
def test_only_what_runs_is_read(tmp_path, script):
    run = read(tmp_path, script)
    assert parameters(run) == EIGHT_LAYERS
    assert (run.now.layout, str(run.now.recompute)) == ("Ett|tt|tt|ttL", "nothing")


def test_a_comment_is_not_continued(tmp_path):
    run = read(
        tmp_path,
        """
        ARGS=(
            --num-layers 8
            # --recompute-granularity selective \\
            --swiglu
            --group-query-attention
            # tried 8 and 2 before \\
            --num-query-groups 4
            REST
        )
        torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}
        """,
    )
    assert parameters(run) == 119_906_304


def test_brackets_in_an_argument_list(tmp_path):
    text = """
        --num-experts 8
        --moe-layer-freq ([0]*2+[1]*6)
        --num-layers 8
        REST --pipeline-model-parallel-layout Et|tt|ttt|ttL
    """
    run = read(tmp_path, text, "arguments.txt")
    assert [block.routed for block in run.model.blocks] == [False] * 2 + [True] * 6
    assert parameters(run) == 486_125_568
    assert run.now.layout == "Et|tt|t*3|ttL"


def test_a_sourced_file_is_read(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL_ARGS=(--num-layers ${NLAYERS:-8})\n")
    script = """
        SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
        source "${SCRIPT_DIR}/models/small.sh"
        torchrun pretrain_gpt.py ${MODEL_ARGS[@]} REST
    """
    assert read(tmp_path, script).num_layers == 8
    (tmp_path / "models" / "small.sh").unlink()
    with pytest.raises(InputError, match=r"line 3: it is unknown which arguments .*small.sh \(line 2\)"):
        read(tmp_path, script)


def test_files_that_source_others_know_where_they_are(tmp_path):
    library = tmp_path / "lib" / "models"
    library.mkdir(parents=True)
    (library / "small.sh").write_text(
        'ROTARY_BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n'
        'model() { echo "${BASH_SOURCE[0]##*/} ${BASH_SOURCE[1]##*/}"; }\n'
        '[ "${BASH_SOURCE[0]}" = "$0" ] && MODEL_ARGS=(--num-layers 32)\n'
        'CALLER="${BASH_SOURCE[1]##*/} ${BASH_SOURCE[-1]##*/} ${#BASH_SOURCE[@]}"\n'
    )
    (library / "base.sh").write_text("MODEL_ARGS=(--num-layers 8 --rotary-base $ROTARY_BASE)\n")
    script = textwrap.dedent("""
        source lib/models/small.sh
        torchrun pretrain_gpt.py ${MODEL_ARGS[@]} "$CALLER" "$(model)" "${BASH_SOURCE[0]}"
    """)
    ((_, *theirs),) = passed_by_bash(script, tmp_path)
    ((_, found),) = launches(str(tmp_path / "script.sh"), script)
    assert found[:-1] == theirs[:-1]
    assert found[:4] == ["--num-layers", "8", "--rotary-base", "5000000"]


def test_variables_that_are_not_set_are_noted(tmp_path):
    run = read(tmp_path, '[ "$BIG" = 1 ] && NL=32\ntorchrun pretrain_gpt.py --num-layers ${NL:-8} $EXTRA REST\n')
    assert run.num_layers == 8
    assert "not set in it: $BIG" in run.notes[0]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "torchrun a.py --num-layers $NL REST",
            r"--num-layers: \$NL is not set in this file \(line 1\); write its value",
        ),
        ('torchrun a.py --num-layers "$1" REST', r"--num-layers: \$1 is not set in this file"),
        (
            "TOKENS=$3\nITERS=$(( ${TOKENS} / ${BATCH} ))\ntorchrun a.py --num-layers 8 --train-iters $ITERS REST",
            r"line 2: .*fails: operand expected; not set in the script: \$3, \$BATCH; give",
        ),
        (
            "N=$(nproc)\ntorchrun a.py --num-layers $((N / 2)) REST",
            r"--num-layers: \$\(nproc\) is known only when .*line 1",
        ),
        (
            "NL=8\nif [ -f big ]; then NL=32; fi\ntorchrun a.py --num-layers $NL REST",
            r"--num-layers: depends on `\[ -f big \]`, which is known only when the script runs \(line 2\)",
        ),
        (
            "if OUT=$(nvidia-smi -L); then NL=8; else NL=32; fi\ntorchrun a.py --num-layers $NL REST",
            r"--num-layers: depends on `nvidia-smi -L`, which is known only when the script runs \(line 1\)",
        ),
        (
            "case $(hostname) in a*) NL=8;; *) NL=32;; esac\ntorchrun a.py --num-layers $NL REST",
            r"--num-layers: depends on .*hostname",
        ),
        (
            "for f in $(ls); do ARGS+=(--swiglu); done\ntorchrun a.py --num-layers 8 REST ${ARGS[@]}",
            "it is unknown which arguments Megatron gets",
        ),
        ("torchrun a.py --num-layers 8 REST 1 $(cat more.txt)", r"it is unknown which arguments .*\$\(cat more.txt\)"),
        ("torchrun a.py --num-layers 8 REST\ntorchrun a.py --num-layers 9 REST", r"several trainings .*lines 1 and 2"),
        ("ARGS=(--num-layers 8 REST)", "has no command that starts Megatron"),
        (
            "python3 search_dist.py configs/search.yaml",
            "line 1: `python3 search_dist.py .*` has no argument of Megatron",
        ),
        ("read -d : ARGS < args.txt\ntorchrun a.py $ARGS", r"line 2: it is unknown .*\$ARGS .*runs \(line 1\)"),
        ("torchrun a.py\n--num-layers 8 REST", "line 2: --num-layers starts a line of its own"),
        ("# a \\\r\ntorchrun a.py \\\r\n--num-layers 8 REST\r\n", r"line 2: has a carriage return .* with dos2unix"),
        ('A="--swiglu \\\r\n--bf16"\r\ntorchrun a.py $A --num-layers 8 REST\r\n', "line 1: has a carriage return"),
        ("--swiglu\r\n--num-layers 8 \\\r\nREST", "line 2: has a carriage return"),
        ('[ -n "$NODE" ] || exit 1\ntorchrun a.py --num-layers 8 REST', "line 1: ends the script before it starts"),
        ("torchrun a.py --moe-layer-freq ([0]*2+[1]*6) REST", r"line 1: cannot be read: '\(' is unexpected; quote it"),
        ("if true; then\ntorchrun a.py --num-layers 8 REST", "cannot be read"),
        ("echo 'unfinished\ntorchrun a.py --num-layers 8 REST", "line 1: cannot be read: a quote ' is not closed"),
        ("torchrun a.py --num-layers 8 REST --vision-layers 24", "--vision-layers: describes a multimodal model"),
        ("torchrun a.py --model-provider vlm --num-layers 8 REST", "plans language models only"),
    ],
)
def test_scripts_that_are_refused(tmp_path, script, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, script)


DOUBLING = "\n".join(['A0="--num-layers 12"', *(f'A{i}="$A{i - 1} $A{i - 1}"' for i in range(1, 40))])


@pytest.mark.parametrize(
    "script",
    [
        f"{DOUBLING}\ntorchrun a.py $A39 REST",
        'A=(1 2)\nfor i in {1..40}; do A+=("${A[@]}"); done\ntorchrun a.py ${A[@]} REST',
        "torchrun a.py {1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9} REST",
        "torchrun a.py {1..99999999999} REST",
        "f() { f; f; }\nf\ntorchrun a.py REST",
        "x=1\nwhile true; do x=$((x + 1)); done\ntorchrun a.py REST",
        "for ((;;)); do :; done\ntorchrun a.py REST",
        'A=\'eval "$A"\'\neval "$A"\ntorchrun a.py REST',
        "a=a+a\ntorchrun a.py --num-layers $((a)) REST",
        "x=aaaaaaaaaaaaaaaaaaaa\nfor i in {1..12}; do x=$x$x; done\n: ${x%%*a*a*a*b}\ntorchrun a.py REST",
        "x=aaaaaaaaaaaaaaaaaaaa\nfor i in {1..15}; do x=${x//a/aa}; done\ntorchrun a.py REST",
        f"torchrun a.py {'$(echo ' * 200}x{')' * 200} REST",
        f"x=$(({'(' * 3000}1{')' * 3000}))\ntorchrun a.py REST",
        "printf -v x '%9999d%9999d%9999d' {1..400000}\ntorchrun a.py REST",
        "\n".join(f"[ -f f{i} ] && x{i}=1" for i in range(30)) + "\ntorchrun a.py $x1 REST",
    ],
)
def test_small_scripts_stay_small(tmp_path, script):
    """Each would take gigabytes, or run without an end; bash fails on it too, or never returns."""
    with pytest.raises(InputError, match="give the final argument list"):
        read_arguments(written(tmp_path, script))


def test_damaged_scripts_end_in_one_line(tmp_path):
    refused = []
    for seed in range(60):
        chance = random.Random(seed)
        text = list(Generator(seed, probing=True).script())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text))
            text[at : at + chance.randint(0, 3)] = chance.choice(
                [
                    "$(",
                    "`",
                    "'",
                    '"',
                    "${",
                    "}",
                    "((",
                    "[[",
                    "do",
                    "\n",
                    "<<EOF\n",
                    "\\",
                    "{a,b}",
                    "=(",
                    "\0",
                    "\U000f0001",
                    "|",
                ]
            )
        file = tmp_path / "damaged.sh"
        file.write_text("".join(text))
        try:
            read_arguments(file)
        except InputError as error:
            refused.append(str(error).startswith(str(file)))
    assert all(refused)


# ------------------------------------------------------------------ files of other programs


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"model_type": "llama", "num_hidden_layers": 8}',
            "is a Hugging Face configuration.*pipeloom compare",
        ),
        ("a.txt", '{"architectures": ["LlamaForCausalLM"]}', "is a Hugging Face configuration"),
        ("a.json", '{"sys_name": "b200", "accelerator": {}}', "is a file of SimuMax"),
        ("a.json", '{"model_type": "moe", "layer_num": 61, "head_num": 128}', "is a file of SimuMax"),
        ("a.json", '{"tp_size": 1, "micro_batch_num": 8}', "is a file of SimuMax"),
        ("a.json", '{"train_micro_batch_size_per_gpu": 1}', "is a file of DeepSpeed"),
        ("a.json", "[1, 2]", "is JSON, in which Megatron has no arguments"),
        ("a.json", "{", "is JSON"),
        ("a.yaml", "recipe: X\nstep_scheduler: {global_batch_size: 8}\nmodel: {hidden_size: 3}", "of NeMo Automodel"),
        ("a.yaml", "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained}", "of NeMo Automodel"),
        ("a.yaml", "model_name: x\nhuggingface_path: y\nmicro_batch_size: 1", "is a file of LoongForge"),
        ("a.yaml", "model: {model_type: qwen3_vl, foundation: {}}", "is a file of LoongForge"),
        ("a.yaml", "NUM_NODES: 1\nsearch_engine: {}", "is a file of Galvatron"),
        ("a.yaml", "model_type: llama\nhidden_size: 8", "is a Hugging Face configuration"),
        ("a.yaml", "services: {web: {image: x}}", "has neither num_layers nor hidden_size"),
        ("a.csv", "0F0,0F1\n1F0,1F1\n", "is a table"),
        ("a.py", "def recipe(): ...\n", "is a Python file.*ConfigContainer.to_yaml"),
        ("a.toml", "[training]\n", "is TOML"),
    ],
)
def test_files_of_other_programs_are_named(tmp_path, name, text, message):
    pytest.importorskip("yaml")
    with pytest.raises(InputError, match=message):
        read_arguments(written(tmp_path, text, name))


def test_a_remedy_that_does_not_help_is_not_given(tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, "torchrun a.py --hidden-size 8")
    assert str(caught.value).endswith("--num-layers: is missing; add it")


OUTPUT = "$(cat more.txt)"


@pytest.mark.parametrize("more", ["--ffn-hidden-size {}", "--ffn-hidden-size={}", "--swiglu {}"])
@pytest.mark.parametrize("output", [OUTPUT, f'"{OUTPUT}"'])
def test_output_of_a_command_behind_an_argument_that_counts_is_refused(tmp_path, more, output):
    """It may be several words, none, or another argument; within quotes it is one word, which may be an argument."""
    script = f"torchrun pretrain_gpt.py --num-layers 8 REST {more.format(output)}"
    message = (
        r"train.sh: --[a-z0-9-]+: \$\(cat more.txt\) is known only when the script runs \(line 1\); write its value"
    )
    with pytest.raises(InputError, match=message):
        read(tmp_path, script)


@pytest.mark.parametrize("more", ["--ffn-hidden-size 4096 {}", "--lr 1 {}", "--use-flash-attn 1 {}"])
def test_output_of_a_command_that_may_be_arguments_is_refused(tmp_path, more):
    with pytest.raises(InputError, match=r"line 1: it is unknown which arguments Megatron gets: \$\(cat more.txt\)"):
        read(tmp_path, f"torchrun pretrain_gpt.py --num-layers 8 REST {more.format(OUTPUT)}")


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("--lr {}", True),
        ("--save ckpt-{}", True),
        ("--use-flash-attn {} --swiglu", True),
        ('--lr "{}"', False),
        ('--lr="{}"', False),
        ('--data-path 0.5 "{}"', True),
    ],
)
def test_output_of_a_command_behind_an_argument_that_changes_nothing_is_noted(tmp_path, more, noted):
    run = read(tmp_path, f"torchrun pretrain_gpt.py --num-layers 8 REST {more.format(OUTPUT)}")
    note = f"{more.split()[0].partition('=')[0]}: {OUTPUT} is known only when the script runs (line 1); "
    note += "it is read as a value, and arguments that it prints are not counted"
    assert (note in run.notes) == noted


def test_a_variable_that_is_not_set_leaves_a_flag_alone(tmp_path):
    assert read(tmp_path, "torchrun pretrain_gpt.py --num-layers 8 REST --swiglu $MORE").model.blocks[0]


@pytest.mark.parametrize("count", [16, 25, 60])
def test_nested_expansions_that_would_take_long_are_refused(tmp_path, count):
    # Each of them is parsed as an expression and then as commands.
    script = f"x={'$(( ' * count}echo 1{' ) )' * count}\ntorchrun pretrain_gpt.py --num-layers 8 REST"
    with pytest.raises(InputError, match=r"line 1: cannot be read: .* are nested more than 40 deep"):
        read(tmp_path, script)


@pytest.mark.parametrize(
    ("start", "opening", "closing"),
    [
        ("x=", "${a:", "}"),  # an offset of ${a:offset:length}, then one of ${a:offset}
        ("", "a[$(", ")"),  # an index that is not closed, then a word
        ("x=", "([$(x=", "))"),  # a key that is not closed, then an item
    ],
)
def test_nested_text_that_is_parsed_again_at_every_level_is_refused(tmp_path, start, opening, closing):
    script = f"{start}{opening * 19}1{closing * 19}\ntorchrun pretrain_gpt.py --num-layers 8 REST"
    with pytest.raises(InputError, match=r"line 1: cannot be read: nested .* take more than 100000 steps to parse"):
        read(tmp_path, script)
