"""A vLLM in a process of its own, driven by JSON lines: for tests/serving and bench/bench_vllm.py.

    connector = {"remote_url": "lm://127.0.0.1:8080"}
    with LLMProcess(model, log, dtype="float32", connector=connector) as llm:
        (answer,) = llm.generate([prompt_ids], max_tokens=16)
        # {"tokens": [...], "cached": 640, "ttft": 0.1}

Everything that vLLM prints goes to `log`. Run as a script, this file is the process itself.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def vllm_environment(rpc_folder: str, bind: str = "0") -> dict[str, str]:
    """bind: the cores of each rank. A connector changes what vLLM chooses by itself, and with it
    speed and output."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "VLLM_RPC_BASE_PATH": rpc_folder,  # vLLM's own sockets lie there too
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for ask_workers below
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def transfer_config(connector: dict[str, Any]) -> dict[str, Any]:
    """What --kv-transfer-config takes, with these settings of our connector."""
    ours = {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "vllm_connector",
        "kv_role": "kv_both",
    }
    return {**ours, "kv_connector_extra_config": connector}


class LLMProcess:
    """connector: our connector's settings, or None for a vLLM without. path: more folders to import
    from. settings: vllm.LLM's arguments."""

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: dict | None = None,
        bind: str = "0",
        path: str = "",
        **settings: Any,
    ):
        settings = {
            "model": str(model),
            "enforce_eager": True,
            "disable_log_stats": False,
            **settings,
        }
        if connector is not None:
            settings["kv_transfer_config"] = transfer_config(connector)
        self.log = log
        self._folder = tempfile.TemporaryDirectory(prefix="vllm")
        self._log = log.open("w")
        environment = vllm_environment(self._folder.name, bind)
        environment["PYTHONPATH"] += f":{path}" if path else ""
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings)], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._reply()

    def _reply(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"vLLM ended, its log is {self.log}:\n{self.log.read_text()[-3000:]}"
            )
        return json.loads(line)

    def call(self, name: str, **arguments: Any) -> Any:
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
        return self.call("generate", prompts=prompts, **arguments)

    def stats(self) -> list[dict[str, int]]:
        """The figures of each rank's engine."""
        return self.call("stats")

    def __enter__(self) -> "LLMProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()


# --------------------------------------------------------------------------------------------------
# In the process


def worker_engine():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().engine


def worker_stats(_: Any) -> dict[str, int]:
    return worker_engine().stats()


def worker_clear(_: Any, rank: int) -> None:
    """Makes one rank forget, rank -1 all."""
    engine = worker_engine()
    if rank in (-1, engine.metadata.worker_id):
        engine.clear()


def worker_flush(_: Any) -> bool:
    return worker_engine().flush()


class Commands:
    def __init__(self, llm: Any):
        self.llm = llm
        self.count = 0

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salts: list[str] | None = None,
        abort: list[int] = (), steps: int = 3, transfer: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """All prompts at once. abort: indices of requests that are ended after so many steps.
        transfer: their kv_transfer_params. lora: of their LoRARequest."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = {"kv_transfer_params": transfer} if transfer else None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        )
        engine, ids, answers, stepped = self.llm.llm_engine, [], {}, 0
        for index, prompt in enumerate(prompts):
            self.count += 1
            item = {
                "prompt_token_ids": prompt,
                **({"cache_salt": salts[index]} if salts and salts[index] else {}),
            }
            ids.append(str(self.count))
            engine.add_request(
                ids[-1], item, params, lora_request=LoRARequest(**lora) if lora else None
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "ttft": output.metrics.first_token_latency,
                    }
            stepped += 1
            if stepped == steps and abort:
                engine.abort_request([ids[index] for index in abort], internal=False)
        return [answers.get(request_id) for request_id in ids]

    def generate_from_embeddings(
        self, prompt: list[int], scale: float, max_tokens: int
    ) -> dict[str, Any]:
        import torch
        from safetensors import safe_open
        from vllm import SamplingParams

        with safe_open(f"{self.llm.model_config.model}/model.safetensors", "pt") as weights:
            rows = weights.get_tensor("model.embed_tokens.weight")[prompt]  # [T, hidden]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt_embeds = (rows * scale).to(torch.float32)
        (output,) = self.llm.generate({"prompt_embeds": prompt_embeds}, params, use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def stats(self) -> list[dict[str, int]]:
        return self.llm.collective_rpc(worker_stats)

    def clear(self, rank: int = -1) -> None:
        self.llm.collective_rpc(worker_clear, args=(rank,))

    def flush(self) -> bool:
        return all(self.llm.collective_rpc(worker_flush))

    def reset(self, connector: bool = False) -> bool:
        """Forgets vLLM's own prefix cache, and tells the connector to forget too."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def preemptions(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    from vllm import LLM

    commands = Commands(LLM(**json.loads(sys.argv[1])))
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(**arguments)), file=replies, flush=True)


if __name__ == "__main__":
    main()
