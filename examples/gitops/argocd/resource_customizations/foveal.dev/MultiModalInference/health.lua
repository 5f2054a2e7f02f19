-- Health of a MultiModalInference for Argo CD: the same verdicts as kstatus, with a message.
local health = { status = "Progressing", message = "Waiting for the operator" }

if obj.spec ~= nil and obj.spec.paused == true then
  health.status = "Suspended"
  health.message = "spec.paused is true"
  return health
end

-- A status of an older spec says nothing about this one.
if obj.status == nil or obj.status.conditions == nil
    or obj.status.observedGeneration ~= obj.metadata.generation then
  return health
end

local found = {}
for _, condition in ipairs(obj.status.conditions) do
  found[condition.type] = condition
end

local function is_true(kind)
  return found[kind] ~= nil and found[kind].status == "True"
end

local function text(kind)
  local condition = found[kind]
  return condition.message ~= nil and condition.message ~= "" and condition.message
    or condition.reason or kind
end

if is_true("Reconciling") then
  health.message = text("Reconciling")
elseif is_true("Stalled") then
  health.status = "Degraded"
  health.message = text("Stalled")
elseif is_true("Ready") then
  health.status = "Healthy"
  health.message = text("Ready")
elseif found["Ready"] ~= nil then
  health.message = text("Ready")
end
return health
