"""Owns the configuration file: its sections, their defaults and rules. Every field says what it is for.

`deployments.config_file` reads YAML into these models; `deployments.engine_settings` and
`deployments.router_settings` make settings of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bench.emulated_model import EMULATED
from bench.emulation import Emulation
from deployments.access_config import Access
from deployments.workloads import Probability, Workloads, read_workloads
from deployments.yaml_file import Section
from router.costs import CostDefaults

Dtype = Literal["bfloat16", "float16", "float32"]
DrafterName = Literal["draft_model", "ngram"]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

_ASSUMED = CostDefaults()


class KVCache(Section):
    """Size of a KV pool: a number of blocks, or the memory they may take."""

    num_blocks: Annotated[int, Field(ge=2)] | None = None
    """Blocks in the pool. Exactly one of num_blocks and memory_gib is given."""
    memory_gib: Annotated[float, Field(gt=0.0)] | None = None
    """Memory for keys and values on each device, in GiB; the number of blocks follows from the model's shape."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens per block."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.num_blocks is None) == (self.memory_gib is None):
            raise ValueError("give exactly one of num_blocks and memory_gib")
        return self


class Reproducible(Section):
    """Fixed forward shapes, so that greedy output depends on neither speculation nor neighbours (docs/design.md §6)."""

    enabled: bool = True
    """Off lets forwards take any shape: faster in large batches, but bf16 ties may fall either way."""
    prompt_rows: Count = 64
    """Rows of every forward over prompt positions."""
    generated_rows: Annotated[int, Field(ge=2)] = 8
    """Rows of every forward over generated positions; a proposal has at most one token less."""


class Engine(Section):
    """What target and draft have in common."""

    model: str
    """Hugging Face folder, or a built-in model's name."""
    dtype: Dtype = "bfloat16"
    """Number format of weights and KV."""
    device: str = "auto"
    """torch device; auto takes CUDA where the replica was given a GPU, else the CPU."""
    threads: Count = 1
    """CPU threads of one forward."""
    attention: Literal["auto", "gather_sdpa", "flex"] = "auto"
    """Attention backend; auto takes flex on CUDA and gather_sdpa, the oracle, elsewhere."""
    num_replicas: Count = 1
    """Copies of the model, each with its own KV pool."""
    kv_cache: KVCache = KVCache(num_blocks=1024)
    """Size of the KV pool."""
    max_sessions: Count = 64
    """Open sessions per replica; more are refused with RESOURCE_EXHAUSTED."""
    max_num_batched_tokens: Count = 256
    """Most rows of one forward outside reproducible mode."""
    max_context_length: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of one session, prompt and output; unset takes the model's own limit."""
    reproducible: Reproducible = Reproducible()
    """Fixed forward shapes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the generator that requests without a seed draw from."""
    stall_limit_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds one step may take before the replica counts as stuck and is restarted. The first step is the longest
    where a backend compiles."""
    ray_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 1})
    """What one replica asks of Ray: num_cpus, num_gpus, resources, …"""


class Target(Engine):
    """The model whose output is served."""

    model: str = "smollm2-135m-instruct"
    """Hugging Face folder, or a built-in model's name."""
    tensor_parallel_size: Count = 1
    """Devices one copy is spread over. Each has a process of its own, which asks Ray for `ray_actor_options`."""
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """How Ray places the processes of one copy; STRICT_PACK keeps them on one node."""
    collective_timeout_s: Annotated[float, Field(gt=0.0)] = 20.0
    """Seconds after which a process that keeps the others of its copy waiting counts as hung; the copy is rebuilt."""

    @property
    def rank_resources(self) -> dict[str, float]:
        """What one of the processes takes, by Ray's names; its bundle in the placement group."""
        options = self.ray_actor_options
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        return {name: float(amount) for name, amount in asked.items() if amount}

    @model_validator(mode="after")
    def _ranks_take_something(self) -> Self:
        if self.tensor_parallel_size > 1 and not self.rank_resources:
            raise ValueError(
                f"ray_actor_options asks for nothing, but each of the {self.tensor_parallel_size} processes of a "
                "target needs a place: give num_gpus, num_cpus or resources"
            )
        return self


class Draft(Engine):
    """The small model that proposes."""

    model: str = "smollm2-135m-draft"
    """Hugging Face folder, or a built-in model's name. It must share the target's vocabulary."""
    enabled: bool = True
    """Off starts no draft replica; n-gram drafting remains."""
    application: str = ""
    """Another Serve application whose draft replicas propose here too; this one then starts none. Their target must
    have the vocabulary of this one's."""

    @property
    def has_replicas(self) -> bool:
        """Whether this application starts draft replicas of its own."""
        return self.enabled and not self.application

    top_probs: Annotated[int, Field(ge=1, le=1024)] = 32
    """Tokens a sampled draft distribution is cut to; it is what the draft samples from and what it sends."""
    reproducible: Reproducible = Reproducible(enabled=False)
    """Fixed forward shapes. Off: what a draft proposes never changes what the target outputs."""


class Costs(Section):
    """What a round takes, as the policy assumes it until it has seen rounds. `outrider calibrate` measures it.

    Give all three or none: what counts at first is how they compare.
    """

    verify_s: Seconds = _ASSUMED.verify_s
    """Seconds of a forward of the target."""
    draft_token_s: Seconds = _ASSUMED.draft_token_s
    """Seconds of the draft for each token it proposes."""
    overhead_s: Seconds = _ASSUMED.overhead_s
    """Seconds of a round beside its forward; one that waits for the draft takes half as much again."""

    def as_defaults(self) -> CostDefaults:
        return CostDefaults(**self.model_dump())


class Speculation(Section):
    """When and how far to speculate. A request may ask for less, never for more."""

    enabled: bool = True
    """Off decodes plainly for every request."""
    drafters: tuple[DrafterName, ...] = ("draft_model", "ngram")
    """Drafters the policy may pick from."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 7
    """Most draft tokens of one round (K)."""
    run_ahead: bool = True
    """The draft drafts on behind likely outcomes while its proposal is verified."""
    batch_weight: Probability = 1.0
    """How a request counts what its draft tokens cost: 0 what they cost itself, for the least latency of each; 1 what
    they would cost if all requests did the same, for the most tokens/s of all together."""
    temperature_threshold: Annotated[float, Field(gt=0.0)] = 0.9
    """From this temperature on, speculation is off with reason `temperature`."""
    acceptance_floor: Probability = 0.05
    """Least chance of its first draft token for a drafter to be asked; below it speculation is off with reason
    `acceptance`, and probed again later."""
    workloads: Workloads | None = None
    """The classes of requests and what acceptance to expect of each: the path of a file, or what such a file holds;
    unset takes the packaged one, deployments/workloads.yaml."""
    costs: Costs = Costs()
    """What a round takes, as it is assumed at first."""

    @field_validator("workloads", mode="before")
    @classmethod
    def _read_workloads(cls, given: object) -> object:
        """Read where the configuration is, so that routers on other machines need no such file."""
        if isinstance(given, str):
            return read_workloads(given)
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"give the path of a file, or its content, found {given!r}")
        return given


class Router(Section):
    """The replicas that own sessions and talk to callers."""

    num_replicas: Count = 1
    """Router replicas; each keeps one stream to every draft and target replica."""
    max_concurrent: Count = 64
    """Requests one router works on at a time."""
    max_queued: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait for a place; more are refused with RESOURCE_EXHAUSTED."""
    peer_refresh_s: Annotated[float, Field(gt=0.0)] = 2.0
    """Seconds between two looks at which draft and target replicas are alive."""
    failover_wait_s: Annotated[float, Field(ge=0.0)] = 60.0
    """Seconds a request waits for a target where none is there, or its own was lost and none is left; never past its
    deadline. Then it fails with UNAVAILABLE; 0 does not wait. Longer than a target takes to restart is right."""
    drain_s: Annotated[float, Field(ge=0.0)] = 120.0
    """Seconds a router that is being replaced gets to finish its requests."""
    slow_reader_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds for which a caller may leave unread what is there for it. Then its request is ended with
    RESOURCE_EXHAUSTED and holds no blocks any more."""
    ray_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 0})
    """What one replica asks of Ray."""


class Server(Section):
    """Where callers connect."""

    host: str = "127.0.0.1"
    """Address that HTTP (health and metrics of Serve) listens on."""
    grpc_port: Port = 9000
    """Port of the public gRPC API."""
    http_port: Port = 8000
    """Port of Serve's HTTP ingress; Kubernetes probes it."""
    haproxy: bool = True
    """Serve's HAProxy in front of the routers. Off takes Serve's Python proxy, which adds milliseconds a message."""


class Tls(Section):
    """Mutual TLS between routers, drafts and targets. The public API is none of its business (docs/operations.md)."""

    folder: str
    """Folder with tls.crt, tls.key and ca.crt, as in a Secret of cert-manager's; read again whenever they change. Each
    kind of replica has its own in it."""
    domain: str = "outrider"
    """What names end with: certificates are for router.DOMAIN, draft.DOMAIN and target.DOMAIN."""


class OutriderConfig(Section):
    """The whole file."""

    target: Target = Target()
    """The model whose output is served."""
    draft: Draft = Draft()
    """The small model that proposes."""
    speculation: Speculation = Speculation()
    """When and how far to speculate."""
    router: Router = Router()
    """The replicas that own sessions."""
    server: Server = Server()
    """Where callers connect."""
    access: Access = Access()
    """Who may call, and how much."""
    tls: Tls | None = None
    """Mutual TLS between routers, drafts and targets; unset they speak plaintext."""
    emulation: Emulation | None = None
    """Emulated devices in the place of models, for benchmarks (bench/profiles)."""

    @model_validator(mode="after")
    def _emulated_or_not(self) -> Self:
        models = (self.target.model, self.draft.model)
        if self.emulation is None and EMULATED in models:
            raise ValueError(f"the model `{EMULATED}` needs the section `emulation`")
        if self.emulation is not None and set(models) != {EMULATED}:
            raise ValueError(f"with `emulation`, target.model and draft.model are `{EMULATED}`, found {models}")
        if self.emulation is not None and self.target.tensor_parallel_size > 1:
            raise ValueError("with `emulation`, target.tensor_parallel_size is 1: the profile's times are the group's")
        return self

    @model_validator(mode="after")
    def _proposals_fit(self) -> Self:
        shapes = self.target.reproducible
        if shapes.enabled and self.speculation.max_draft_tokens >= shapes.generated_rows:
            raise ValueError(
                f"speculation.max_draft_tokens is {self.speculation.max_draft_tokens}, but "
                f"target.reproducible.generated_rows of {shapes.generated_rows} leaves room for "
                f"{shapes.generated_rows - 1}"
            )
        return self
