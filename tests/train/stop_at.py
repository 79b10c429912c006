"A callback that ends a run early."

from lightning.pytorch.callbacks import Callback


class StopAt(Callback):
    "Ask the trainer to stop once a step is finished; a resume after it takes none."

    def __init__(self, step):
        self.step = step

    def on_train_start(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step
