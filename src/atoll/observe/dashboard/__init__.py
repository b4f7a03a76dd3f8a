"""The live dashboard: a page and its figures, on the syncer's own port. It only reads.

`history` folds events and statuses into what is shown, `site` serves it and sends it to browsers. The page itself is in
`assets`: plain HTML, CSS and JavaScript, nothing from elsewhere but plotly's own file.
"""

from atoll.observe.dashboard.site import Dashboard, pages

__all__ = ["NAME", "Dashboard", "pages"]

NAME = f"{__name__}:pages"
"""As a syncer in a process of its own is told of it."""
