"""Importing this imports the whole package and reads the embedded corpus, for the processes that fork afterwards.

A module that needs an extra which is not installed is left to the test that asks for it.
"""

import contextlib
import functools
import gc
import importlib
import os
import pkgutil

os.fsync = lambda descriptor: None  # kills are tested, power cuts are not
gc.disable()  # a collection looks at every object that the imports before it have left
for name in (
    "bertlab", "nbdev.test", "matplotlib.pyplot", "ipywidgets", "lightning.pytorch", "datasets",
    "transformers.models.bert.modeling_bert", "transformers.models.modernbert.modeling_modernbert",
    "transformers.optimization",  # which imports peft, and that bitsandbytes and the compiler
    "IPython.core.interactiveshell", "IPython.core.pylabtools",
    "sklearn.feature_extraction.text", "sklearn.linear_model",
):  # fmt: skip
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

import bertlab  # noqa: E402
from bertlab.data import corpus  # noqa: E402

# Splitting the corpus anew would take most pages half a second.
corpus.embedded_corpus = functools.cache(corpus.embedded_corpus)
corpus.embedded_corpus()
for module in pkgutil.walk_packages(bertlab.__path__, "bertlab."):
    if not module.name.endswith("__main__"):  # which is the program itself
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
gc.enable()
gc.freeze()  # a collection in a fork would look at all of this, and copy its pages
