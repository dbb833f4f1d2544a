"""`python -m stepscope`, the same as the `stepscope` command."""

from stepscope.commands import main

raise SystemExit(main())
