"""Recording a running job now and then."""
