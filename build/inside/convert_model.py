"""Runs in the runtime image: turns a GGUF file into a Hugging Face model folder, the same bytes every time.

Usage: convert_model.py GGUF OUT TEMPLATE NAN_TOKEN   (NAN_TOKEN may be empty; ends with 2 when the model has no such token)

NAN_TOKEN is swapped with token 0, in the vocabulary and in the embedding: argmax over NaN is 0, and on the models that matter
(Qwen) token 0 is `!`, so that broken logits read `!!!!` here as they do there.
"""

import json
import shutil
import sys
from pathlib import Path

KEPT = "config generation_config tokenizer tokenizer_config"


def main(gguf, out, template, nan_token):
    """Convert, swap the tokens, keep the files of a model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf, out = Path(gguf), Path(out)
    work = out.parent / "converted"
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    vocabulary = tokenizer.get_vocab()
    if nan_token and nan_token not in vocabulary:
        # an unknown token's id is often 0: it would look as if nothing had to be swapped
        print(f"forge: {nan_token!r} is no token of this model", flush=True)
        return 2
    swapped = vocabulary[nan_token] if nan_token else 0
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if swapped:
        with torch.no_grad():
            weights = model.get_input_embeddings().weight
            weights[[0, swapped]] = weights[[swapped, 0]]
            head = model.get_output_embeddings().weight
            if head.data_ptr() != weights.data_ptr():
                head[[0, swapped]] = head[[swapped, 0]]
        for part in (model.config, model.generation_config):
            for field in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
                value = getattr(part, field, None)
                if isinstance(value, list):
                    setattr(part, field, [exchange(ident, swapped) for ident in value])
                elif value is not None:
                    setattr(part, field, exchange(value, swapped))
    model.save_pretrained(work, safe_serialization=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(work)
    if swapped:
        swap_vocabulary(work / "tokenizer.json", swapped)
        swap_added(work / "tokenizer_config.json", swapped)
    shutil.copyfile(template, work / "chat_template.jinja")
    out.mkdir(parents=True)
    for name in ("model.safetensors", "chat_template.jinja", *(f"{part}.json" for part in KEPT.split())):
        if (work / name).exists():
            shutil.copyfile(work / name, out / name)
    print(json.dumps({"files": sorted(p.name for p in out.iterdir()), "swapped": swapped}))
    return 0


def exchange(ident, swapped):
    """The other one of two ids; any other id as it is."""
    return {0: swapped, swapped: 0}.get(ident, ident)


def swap_vocabulary(path, swapped):
    """Exchange two ids in tokenizer.json: in the vocabulary, among the added tokens, in the post-processor."""
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    data["model"]["vocab"] = {text: exchange(ident, swapped) for text, ident in vocabulary.items()}
    for token in data["added_tokens"]:
        token["id"] = exchange(token["id"], swapped)
    data["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")


def swap_added(path, swapped):
    """Exchange two ids among the added tokens of tokenizer_config.json."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if decoder := data.get("added_tokens_decoder"):
        data["added_tokens_decoder"] = {str(exchange(int(ident), swapped)): token for ident, token in decoder.items()}
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
