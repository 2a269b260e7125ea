"""Requests to Kubernetes through its official client: jobs by name, pods and their logs.

Where the API server does not answer (it is being restarted), a question is repeated for `patience_s`; then it
raises NoAnswerError.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.kubernetes_objects import APIS, ATTEMPT_LABEL
from quartet_plugin.launchers.patience import PATIENCE_S, NoAnswerError

REQUEST_S = 30.0
_PAUSE_S = 2.0
_ABSENT, _CONFLICT = 404, 409
# Answers of a server that is overloaded or away.
_AWAY = (408, 429, 500, 502, 503, 504)
_LOG_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReference:
    """Where the object of an attempt is; `uid` is the server's name of it, None as long as it is unknown."""

    kind: str
    namespace: str
    name: str
    context: str | None = None
    uid: str | None = None


class KubernetesApi:
    """The API server of a context. Raises ConfigError where none is configured."""

    def __init__(self, context: str | None) -> None:
        from kubernetes import client, config

        configuration, file = client.Configuration(), os.environ.get("KUBECONFIG")
        try:
            if context is None and file is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=configuration)
            else:
                config.load_kube_config(file, context=context, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            line = str(error).splitlines()[0]
            raise ConfigError(
                f"launcher: kubernetes; no cluster is configured: {line}; set KUBECONFIG, correct "
                "kubernetes.context, or run it in a pod with a service account"
            ) from error
        # Answers are repeated here, where the time is counted.
        configuration.retries = False
        api = client.ApiClient(configuration)
        self._objects, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)

    def create(self, job: JobReference, body: dict[str, Any]) -> str:
        """Create the object; its uid. One of the same attempt that is there already is it."""
        made = self._asked(
            lambda: self._objects.create_namespaced_custom_object(
                *self._where(job), body, _request_timeout=REQUEST_S
            ),
            allowed=_CONFLICT,
        )
        if made is None:
            made = self.read(job)
            wanted = body["metadata"]["labels"][ATTEMPT_LABEL]
            if made is None or made["metadata"].get("labels", {}).get(ATTEMPT_LABEL) != wanted:
                raise InfrastructureError(
                    f"Kubernetes: {job.name} is there already and no attempt of this run"
                )
        uid: str = made["metadata"]["uid"]
        return uid

    def read(self, job: JobReference, *, patience_s: float = PATIENCE_S) -> dict[str, Any] | None:
        """The object; None where there is none, or where one of its name is another."""
        answer: dict[str, Any] | None = self._asked(
            lambda: self._objects.get_namespaced_custom_object(
                *self._where(job), job.name, _request_timeout=REQUEST_S
            ),
            allowed=_ABSENT,
            patience_s=patience_s,
        )
        if answer is not None and job.uid is not None and answer["metadata"]["uid"] != job.uid:
            return None
        return answer

    def delete(self, job: JobReference) -> None:
        """Delete the object with this uid, and before it its pods; one that is gone is no error."""
        from kubernetes.client import V1DeleteOptions, V1Preconditions

        options = V1DeleteOptions(propagation_policy="Foreground", preconditions=V1Preconditions(uid=job.uid))
        # 409: the name is another object's by now.
        self._asked(
            lambda: self._objects.delete_namespaced_custom_object(
                *self._where(job), job.name, body=options, _request_timeout=REQUEST_S
            ),
            allowed=(_ABSENT, _CONFLICT),
        )

    def pods(
        self, job: JobReference, attempt_id: str, *, patience_s: float = PATIENCE_S
    ) -> list[dict[str, Any]]:
        """The pods of an attempt, as plain data."""
        answer = self._asked(
            lambda: self._core.list_namespaced_pod(
                job.namespace, label_selector=f"{ATTEMPT_LABEL}={attempt_id}", _request_timeout=REQUEST_S
            ),
            patience_s=patience_s,
        )
        pods: list[dict[str, Any]] = self._core.api_client.sanitize_for_serialization(answer)["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def log(self, namespace: str, pod: str) -> str:
        """The last lines that a pod has printed; empty where there is none."""
        text = self._asked(
            lambda: self._core.read_namespaced_pod_log(
                pod, namespace, tail_lines=_LOG_LINES, _request_timeout=REQUEST_S
            ),
            allowed=(_ABSENT, 400),
        )
        return "" if text is None else str(text)

    @staticmethod
    def _where(job: JobReference) -> tuple[str, str, str, str]:
        group, version, plural = APIS[job.kind]
        return group, version, job.namespace, plural

    @staticmethod
    def _asked(
        ask: Callable[[], Any], *, allowed: int | tuple[int, ...] = (), patience_s: float = PATIENCE_S
    ) -> Any:
        """The answer; None for an allowed status. Raises InfrastructureError with the server's reason."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        is_allowed = (allowed,) if isinstance(allowed, int) else allowed
        end = time.monotonic() + patience_s
        while True:
            try:
                return ask()
            except ApiException as error:
                if error.status in is_allowed:
                    return None
                fault = _reason(error)
                if error.status not in _AWAY:
                    raise InfrastructureError(f"Kubernetes: {fault}") from error
            except (HTTPError, OSError) as error:
                fault = f"no answer: {type(error).__name__}"
            if time.monotonic() >= end:
                raise NoAnswerError(f"Kubernetes: {fault}; is the API server up?")
            time.sleep(_PAUSE_S)


def _reason(error: Any) -> str:
    """The server's own words in one line."""
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    return f"{error.status} {' '.join(message.split())[:300]}"
