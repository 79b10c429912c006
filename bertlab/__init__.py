"Train BERT-style encoders. Public names load on first use, so that `import bertlab` costs almost nothing."

__version__ = "0.1.0"


def __getattr__(name: str):
    "Import the module that defines a public name, or is it, when somebody asks for it (PEP 562)."
    from importlib import import_module

    from ._modidx import d

    for module, symbols in d["syms"].items():
        if name == module.rpartition(".")[2] or f"{module}.{name}" in symbols:
            loaded = import_module(module)
            return loaded if name == module.rpartition(".")[2] else getattr(loaded, name)
    raise AttributeError(f"module 'bertlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    from ._modidx import d

    names = {key.rpartition(".")[2] for symbols in d["syms"].values() for key in symbols}
    modules = {module.rpartition(".")[2] for module in d["syms"]}
    return sorted({"__version__"} | {name for name in names | modules if not name.startswith("_")})
