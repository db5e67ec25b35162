from types import SimpleNamespace

from verifiers.v1 import AgentConfig, Env, EnvConfig, Taskset, TasksetConfig


def resolve_env_config(data):
    agents = {name: AgentConfig(**fields) for name, fields in data.items() if name != "taskset"}
    return EnvConfig(taskset=TasksetConfig(**data["taskset"]), **(agents or {"agent": AgentConfig()}))


def load_environment(config):
    return Env(config)


def load_taskset(config):
    return Taskset(config)


def harness_class(ident):
    return SimpleNamespace(EXECUTES_CODE=ident == "bash")
