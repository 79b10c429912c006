"""Importing this imports the whole package and reads the embedded corpus, for the processes that fork afterwards.

A module that needs an extra which is not installed is left to the test that asks for it.
"""

import contextlib
import functools
import gc
import importlib
import pkgutil

import sklearn.feature_extraction.text
import sklearn.linear_model  # noqa: F401

import bertlab
from bertlab.data import corpus

# Splitting the corpus anew would take most pages half a second.
corpus.embedded_corpus = functools.cache(corpus.embedded_corpus)
corpus.embedded_corpus()
for module in pkgutil.walk_packages(bertlab.__path__, "bertlab."):
    if not module.name.endswith("__main__"):  # which is the program itself
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
gc.freeze()  # a collection in a fork would look at all of this, and copy its pages
