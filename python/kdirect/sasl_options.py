"""The rows of SASL logins in the table of brokers (`options.py`): tickets of Kerberos, and tokens.

Law: as in `options.py`, of which this is a part.  Names, defaults and bounds are those of Kafka
4.1.  No listener here speaks SASL, so nothing asks for these values: as in a Kafka whose listeners
are all PLAINTEXT, they are accepted, also while the broker runs, kept and shown, without effect.
What would ask for SASL itself (``sasl.enabled.mechanisms``) is not among them.
"""

from __future__ import annotations

from kdirect.option_table import Option

_NO_EFFECT = "Without effect: no listener here speaks SASL."

# fmt: off
SASL_BROKER_ROWS = (
    Option("sasl.kerberos.kinit.cmd", "str", "/usr/bin/kinit", _NO_EFFECT),
    Option("sasl.kerberos.min.time.before.relogin", "ms", 60_000, _NO_EFFECT),
    Option("sasl.kerberos.principal.to.local.rules", "list", ["DEFAULT"], _NO_EFFECT),
    Option("sasl.kerberos.service.name", "str", None, _NO_EFFECT),
    Option("sasl.kerberos.ticket.renew.jitter", "float", 0.05, _NO_EFFECT),
    Option("sasl.kerberos.ticket.renew.window.factor", "float", 0.8, _NO_EFFECT),
    Option("sasl.login.refresh.buffer.seconds", "int", 300, _NO_EFFECT),
    Option("sasl.login.refresh.min.period.seconds", "int", 60, _NO_EFFECT),
    Option("sasl.login.refresh.window.factor", "float", 0.8, _NO_EFFECT),
    Option("sasl.login.refresh.window.jitter", "float", 0.05, _NO_EFFECT),
)
# fmt: on

# Properties of one broker: Kafka does not set them for all at once.
DYNAMIC_SASL = frozenset(row.name for row in SASL_BROKER_ROWS)

__all__ = ["DYNAMIC_SASL", "SASL_BROKER_ROWS"]
