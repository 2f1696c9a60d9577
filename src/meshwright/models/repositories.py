"""Repositories of presets on the Hugging Face hub."""

from meshwright.models.presets import on_the_hub

# Names of repositories, by owner. The names of presets have no owner, no capitals and no suffix such as -hf.
_REPOSITORIES = {
    "meta-llama": "Llama-2-7b-hf Llama-2-13b-hf Llama-2-70b-hf Meta-Llama-3-8B Meta-Llama-3-70B Llama-3.1-8B "
    "Llama-3.1-70B Llama-3.1-405B Llama-3.2-1B Llama-3.2-3B",
    "mistralai": "Mistral-7B-v0.1 Mixtral-8x7B-v0.1 Mixtral-8x22B-v0.1",
    "Qwen": "Qwen2.5-0.5B Qwen2.5-1.5B Qwen2.5-3B Qwen2.5-7B Qwen2.5-14B Qwen2.5-32B Qwen2.5-72B Qwen3-0.6B "
    "Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B",
    "google": "gemma-2b gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b-pt gemma-3-4b-pt "
    "gemma-3-12b-pt gemma-3-27b-pt",
    "openai-community": "gpt2 gpt2-medium gpt2-large gpt2-xl",
    "openai": "gpt-oss-20b gpt-oss-120b",
    "deepseek-ai": "DeepSeek-V2-Lite DeepSeek-V3 DeepSeek-R1",
    "HuggingFaceTB": "SmolLM2-135M SmolLM2-360M SmolLM2-1.7B",
    "microsoft": "phi-2 phi-4",
    "EleutherAI": "pythia-160m pythia-1.4b pythia-6.9b pythia-12b gpt-neox-20b gpt-j-6b",
    "allenai": "OLMo-2-1124-7B OLMo-2-1124-13B",
}


def repository_of(model: str) -> str:
    """The repository on the Hugging Face hub of a preset; another name as it is.

    >>> repository_of("qwen3-8b"), repository_of("mistral-7b"), repository_of("runs/demo")
    ('Qwen/Qwen3-8B', 'mistralai/Mistral-7B-v0.1', 'runs/demo')
    """
    for owner, names in _REPOSITORIES.items():
        for name in names.split():
            if model.lower() in (name.lower(), on_the_hub(name)):
                return f"{owner}/{name}"
    return model
