"""The public names of `bowline.auditing`, listed once: `lazy_loader` reads this file, and so do type checkers."""

from .adapter_audit import audit_adapter as audit_adapter
from .adapter_report import AdapterReport as AdapterReport
from .audit_report import AuditReport as AuditReport
from .checkpoint_audit import audit as audit
from .checkpoint_comparison import ComparisonReport as ComparisonReport
from .checkpoint_comparison import compare as compare
from .evidence import Evidence as Evidence
from .rules import Finding as Finding
from .rules import Severity as Severity
