"""Module that the fork server imports first; see `pipeloom.forks`."""

from pipeloom.forks import serve_imports

serve_imports()
