"""What plain transformers computes with directories: run by a test, here and with transformers 4.

    python read_directories.py DIRECTORY RESULTS.pt

Each folder of DIRECTORY is a model or a tokenizer. Nothing of bertlab is imported.
"""

import sys
from pathlib import Path

import torch
import transformers

TEXTS = ["the red apple is on a green tree", "Our old HOUSE, naïve: near<extra_a> <extra_b>"]
SECOND = ["when the wind blows", "it falls"]


def read_tokenizer(directory: Path) -> dict:
    "Encode texts, alone and in pairs, and decode them."
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pairs = tokenizer(TEXTS, SECOND, padding=True, return_tensors="pt")
    return {
        "ids": tokenizer(TEXTS).input_ids,
        "pairs": {name: values.tolist() for name, values in pairs.items()},
        "cut": tokenizer(TEXTS[0] * 9, truncation=True).input_ids,
        "masked": tokenizer(f"the {tokenizer.mask_token} apple").input_ids,
        "text": tokenizer.decode(pairs["input_ids"][0], skip_special_tokens=True),
        "special": sorted(set(tokenizer.all_special_tokens)),
    }


def read_model(directory: Path) -> dict:
    "Compute texts with the class that config.json names."
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    cls = getattr(transformers, config.architectures[0])
    model, report = cls.from_pretrained(directory, output_loading_info=True)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model.eval()(**batch)
    # A pooler that is not stored is random, and buffers are computed.
    lost = [str(name) for names in report.values() for name in names
            if not any(part in str(name) for part in ("pooler", "inv_freq"))]  # fmt: skip
    mask = batch["input_ids"] != tokenizer.pad_token_id
    result = {"class": cls.__name__, "lost": lost}
    for name in ("logits", "start_logits", "end_logits", "last_hidden_state"):
        if (values := out.get(name)) is not None:
            result[name] = values[mask] if values.shape[:2] == mask.shape else values
    return result | {"labels": config.id2label}


def read_sentences(directory: Path) -> dict:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return {"vectors": torch.from_numpy(model.encode(TEXTS))}


def read_pairs(directory: Path) -> dict:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu")
    return {"scores": torch.as_tensor(model.predict(list(zip(TEXTS, SECOND))))}


def read_directory(directory: Path) -> dict:
    "Read a directory in every way that it is written for."
    functions = {
        read_tokenizer: True,
        read_model: (directory / "config.json").exists(),
        read_sentences: (directory / "modules.json").exists(),
        read_pairs: directory.name.endswith("-reranker"),
    }
    result = {}
    for function in (function for function, applies in functions.items() if applies):
        try:
            result |= function(directory)
        except Exception as error:
            result[function.__name__] = f"{type(error).__name__}: {error}"[:300]
    return result


def read_all(root: Path) -> dict:
    transformers.utils.logging.set_verbosity_error()
    return {path.name: read_directory(path) for path in sorted(root.iterdir())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = read_all(Path(sys.argv[1]))
    torch.save({"version": transformers.__version__, "results": results}, sys.argv[2])
