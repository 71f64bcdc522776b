"""Train a tiny Llama on conversations from a WebDataset shard, on two ranks. Model and data are created here."""

import io
import json
import tarfile
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import pipeloom as pl

FOLDER = Path("runs/own_data")
WORDS = ["<stop>", *"\n :+abcdefghijklmnopqrstuvwxyz0123456789"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<stop>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def make():  # creates what you would have: the folder of a model with its tokenizer, and shards
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("<stop>|[\\s\\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<stop>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(FOLDER / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), bos_token_id=None, eos_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(FOLDER / "model")
    with tarfile.open(FOLDER / "sums.tar", "w") as shard:
        for number in range(40):
            a, b = number % 10, number // 4
            turns = [("user", f"{a}+{b}"), ("assistant", str(a + b))]
            text = json.dumps([{"role": role, "content": content} for role, content in turns]).encode()
            member = tarfile.TarInfo(f"{number:03d}.json")
            member.size = len(text)
            shard.addfile(member, io.BytesIO(text))


def build_model():
    return pl.from_transformers(FOLDER / "model")


if __name__ == "__main__":
    make()
    data = pl.WebDataset(FOLDER / "*.tar", processor=FOLDER / "model")
    result = pl.fit(build_model, pl.Batches(data, batch=10, epochs=2), ranks=2)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, weights in {result.checkpoint}")
