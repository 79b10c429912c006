"Runs with adapters and frozen parts: resumed bit by bit, merged where others read, guarded and clipped like any."

import copy

import pytest
import torch
from test_training import CONFIG, word_tokenizer

pytest.importorskip("peft")

import peft  # noqa: E402
import transformers  # noqa: E402

from bertlab.data.module import PretrainingDataModule  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.model.config import BertLabConfig  # noqa: E402
from bertlab.model.huggingface import save_model  # noqa: E402
from bertlab.train.checkpoints import TrainingCheckpoint  # noqa: E402
from bertlab.train.resume import check_resume, latest_checkpoint  # noqa: E402
from bertlab.train.history import History  # noqa: E402
from bertlab.train.modules import PretrainingModule  # noqa: E402
from bertlab.train.stopping import NonFiniteGuard  # noqa: E402
from bertlab.train.trainer import make_trainer, seed_everything  # noqa: E402

WORDS = [f"w{i}" for i in range(80)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    "A text and a model to go on with."
    folder = tmp_path_factory.mktemp("adapters")
    lines = (" ".join(WORDS[(7 * i + j * j) % 80] for j in range(5 + i % 9)) for i in range(120))
    (folder / "text.txt").write_text("\n".join(lines))
    torch.manual_seed(0)
    tokenizer = word_tokenizer(WORDS)
    shape = {**CONFIG, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "mlp_dropout": 0.1}
    save_model(BertLabForMaskedLM(BertLabConfig(**shape)), tokenizer, folder / "base")
    return folder


def run(prepared, output, steps, resume=False, **options):
    seed_everything(0)
    data = PretrainingDataModule(str(prepared / "text.txt"), word_tokenizer(WORDS), max_sequence_length=32,
                                 train_batch_size=4, val_batch_size=8)  # fmt: skip
    module = PretrainingModule(pretrained_model_name_or_path=str(prepared / "base"), learning_rate=1e-2,
                               scheduler_warmup_steps=2, **options)  # fmt: skip
    history = History()
    saving = TrainingCheckpoint(output / "checkpoints", 3, models=output / "models")
    callbacks = [history, NonFiniteGuard(), saving]
    trainer = make_trainer(
        steps, "32-true", accelerator="cpu", callbacks=callbacks, accumulate_grad_batches=2
    )
    trainer.fit(
        module,
        data,
        ckpt_path=latest_checkpoint(output / "checkpoints") if resume else None,
        weights_only=True,
    )
    return module


OPTIONS = {
    "lora": dict(adapter={"type": "lora", "r": 4, "lora_dropout": 0.1}),
    "dora, recomputed": dict(adapter="dora", gradient_checkpointing="full"),
    "one block frozen": dict(adapter="lora", freeze=1),
    "frozen patterns": dict(freeze=["embeddings", "*.mlp.*"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_was_stopped_goes_on_bit_by_bit(name, prepared, tmp_path):
    uninterrupted = run(prepared, tmp_path / "whole", 6, **OPTIONS[name])
    run(prepared, tmp_path / "parts", 3, **OPTIONS[name])
    parts = run(prepared, tmp_path / "parts", 6, resume=True, **OPTIONS[name])
    assert all(
        torch.equal(a, b)
        for a, b in zip(uninterrupted.state_dict().values(), parts.state_dict().values())
    )
    moved = {n for n, p in uninterrupted.model.named_parameters() if p.requires_grad}
    assert moved and len(moved) < len(list(uninterrupted.model.parameters()))


def test_a_runs_model_and_adapter_open_in_plain_transformers(prepared, tmp_path):
    module = run(prepared, tmp_path, 4, adapter={"type": "lora", "r": 4})
    model_at = max(tmp_path.glob("models/step-*"))
    reference = transformers.AutoModelForMaskedLM.from_pretrained(model_at).eval()
    assert type(reference).__module__.startswith("transformers")
    ids = torch.randint(5, 60, (2, 9))
    want = module.model.eval()(ids).logits
    torch.testing.assert_close(reference(ids).logits, want, rtol=0, atol=1e-5)
    base = transformers.AutoModelForMaskedLM.from_pretrained(prepared / "base").eval()
    assert (base(ids).logits - want).abs().max() > 1e-3  # the adapter has learned something
    opened = peft.PeftModel.from_pretrained(base, model_at / "adapter").eval()
    torch.testing.assert_close(opened(ids).logits, want, rtol=0, atol=1e-5)


def test_a_checkpoint_loads_without_its_first_weights(prepared, tmp_path):
    module = run(prepared, tmp_path, 3, adapter="lora")
    again = PretrainingModule.load_from_checkpoint(
        latest_checkpoint(tmp_path / "checkpoints"), pretrained_tokenizer_name_or_path=word_tokenizer(WORDS),
        weights_only=True)  # fmt: skip
    ids = torch.randint(5, 60, (2, 9))
    torch.testing.assert_close(again.model.eval()(ids).logits, module.model.eval()(ids).logits)


def test_recomputed_activations_give_the_same_gradient(prepared):
    grads = []
    for setting in (False, "full"):
        seed_everything(0)
        module = PretrainingModule(pretrained_model_name_or_path=str(prepared / "base"), adapter="lora",
                                   gradient_checkpointing=setting)  # fmt: skip
        module.configure_model()
        ids = torch.arange(5, 29).view(2, 12)
        torch.manual_seed(3)
        module.model.train()(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in module.model.parameters() if p.grad is not None])
    assert len(grads[0]) and all(torch.equal(a, b) for a, b in zip(*grads))


def test_an_adapter_on_random_weights_is_refused(prepared):
    data = PretrainingDataModule(
        str(prepared / "text.txt"), word_tokenizer(WORDS), max_sequence_length=32
    )
    module = PretrainingModule(
        copy.deepcopy(CONFIG), adapter="lora", pretrained_tokenizer_name_or_path=data.tokenizer
    )
    with pytest.raises(ValueError, match="pretrained_model_name_or_path"):
        make_trainer(1, "32-true", accelerator="cpu").fit(module, data)


def test_a_run_of_another_adapter_is_not_gone_on_with(prepared, tmp_path):
    run(prepared, tmp_path, 3, adapter="lora")
    module = PretrainingModule(
        pretrained_model_name_or_path=str(prepared / "base"), adapter={"type": "lora", "r": 2}
    )
    with pytest.raises(ValueError, match="adapter"):
        check_resume(latest_checkpoint(tmp_path / "checkpoints"), module, None, 5)
