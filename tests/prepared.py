"""Importing this imports the whole package and reads the embedded corpus, for the processes that fork afterwards.

A module that needs an extra which is not installed is left to the test that asks for it.
"""

import contextlib
import gc
import importlib
import pkgutil

import sklearn.feature_extraction.text
import sklearn.linear_model  # noqa: F401

import bertlab
from bertlab.data.corpus import embedded_corpus

for found in pkgutil.walk_packages(bertlab.__path__, "bertlab."):
    if not found.name.endswith("__main__"):  # which is the program itself
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)
embedded_corpus(max_documents=2)
gc.freeze()  # a collection in a fork would look at all of this, and copy its pages
