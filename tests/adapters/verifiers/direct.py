"""A harness that asks from within verifiers' process, and starts no program: one request for each turn of the user."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class DirectConfig(vf.HarnessConfig):
    pass


class Direct(vf.Harness[DirectConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        async with httpx.AsyncClient(timeout=None) as client:
            headers, body = {"Authorization": f"Bearer {secret}"}, {"model": ctx.model, "messages": list(messages)}
            reply = await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)
        return vf.ProgramResult(exit_code=int(reply.status_code != 200), stdout="", stderr=reply.text)


__all__ = ["Direct"]
