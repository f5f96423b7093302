"""Authorization: the token of an administrator, or of a ServiceAccount with the rights of its Roles."""

from tests.integration.deploy.emulation.resources import ROLE_BINDINGS, ROLES, RefusedError, Resource
from tests.integration.deploy.emulation.store import Store

ADMINISTRATOR = "token-of-the-administrator"
_ACCOUNT = "token-of-account"


def token_of(namespace: str, account: str) -> str:
    """Return the token that is mounted into the account's pods."""
    return f"{_ACCOUNT}:{namespace}:{account}"


def check(
    store: Store, authorization: str, verb: str, resource: Resource, namespace: str, name: str, below: str
) -> None:
    """RefusedError: 401 for an unknown token, 403 for an account without the right. `below`: a part such as `scale`."""
    token = authorization.removeprefix("Bearer ")
    if token == ADMINISTRATOR:
        return
    who, _, whom = token.partition(":")
    if who != _ACCOUNT or not whom:
        raise RefusedError(401, "Unauthorized", "Unauthorized")
    where, _, account = whom.partition(":")
    what = f"{resource.plural}/{below}" if below else resource.plural
    for rule in _rules(store, where, account) if where == namespace else ():
        is_named = "resourceNames" not in rule or name in rule["resourceNames"]
        if resource.group in rule["apiGroups"] and what in rule["resources"] and verb in rule["verbs"] and is_named:
            return
    why = f'User "system:serviceaccount:{where}:{account}" cannot {verb} resource "{what}"'
    raise RefusedError(403, "Forbidden", f"{what} is forbidden: {why}")


def _rules(store: Store, namespace: str, account: str) -> list[dict[str, list[str]]]:
    bindings = [
        each for each in store.all(ROLE_BINDINGS, namespace)
        if {("ServiceAccount", account)} & {(subject["kind"], subject["name"]) for subject in each["subjects"]}
    ]  # fmt: skip
    roles = [store.find(ROLES, namespace, each["roleRef"]["name"]) for each in bindings]
    return [rule for role in roles if role is not None for rule in role["rules"]]
