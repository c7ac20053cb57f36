"""The dashboard: pages for operators at `/ui` of a server. It renders what verbs of the façade return, and calls them.

`site.Dashboard` answers the requests; the server (`custody.http.app`) passes them on.
"""
