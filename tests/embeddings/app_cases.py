"A small folder of documents, and a model that needs no training to search it."

import contextlib
import threading

import torch
from embedding_cases import small_config, small_tokenizer

from bertlab.embeddings.app import FolderIndex, SearchServer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.model.config import BertLabConfig
from bertlab.model.encoder import BertLabModel

FILES = {
    "alpha.md": "# Alpha\n\nalpha beta gamma\n\n## North\n\nnorth wind east\n\n```\n# no heading\n```\n\n### Red\n\nred green blue\n",
    "notes/beta.txt": "A title\n\nomega psi chi.\n\nphi upsilon tau.\n",
    "web.html": "<title>Web &amp; more</title><h2>South</h2><p>south <b>west</b></p><script>evil()</script>",
    "faq.csv": "id,question,answer\n1,what is red?,a colour like blue\n2,what is two?,a number after one\n",
    "rows.jsonl": '{"title": "Mu", "text": "mu nu xi omicron pi"}\n{"city": "rho", "size": 7, "none": null}\n',
    "tools.py": 'def split(text):\n    "Cut a text <img src=x onerror=alert(1)> into words."\n\nclass Box:\n    "A box."\n',
}


def write_files(folder, files=FILES):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def small_model(seed=0):
    torch.manual_seed(seed)
    encoder = BertLabModel(BertLabConfig(**small_config()))
    return BiEncoder(encoder, small_tokenizer(), max_sequence_length=32).eval()


def make_index(path, model=None, files=FILES):
    folder = write_files(path / "docs", files)
    return FolderIndex(model or small_model(), folder, path / "index")


@contextlib.contextmanager
def serving(index, report=""):
    server = SearchServer(port=0)
    server.index, server.report = index, report
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
