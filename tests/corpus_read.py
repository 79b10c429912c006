"Importing this reads the embedded corpus, so that the processes that fork afterwards have it (see forks.py)."

from bertlab.data.corpus import embedded_corpus

embedded_corpus(max_documents=2)
