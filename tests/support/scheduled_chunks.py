"""The chunks in which a scheduler computed a request."""

P = 9


def chunks(drive, request_id):
    return [
        (entry.num_computed_tokens, entry.num_scheduled_tokens)
        for plan in drive.plans
        for entry in plan.scheduled
        if entry.request_id == request_id
    ]
