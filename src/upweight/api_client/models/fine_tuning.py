"""Wire models of the fine-tuning API.

Values of enums that this version does not know are kept as plain text; secrets only occur in requests.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, SecretStr

from upweight.api_client.models._base import HTTPValidationError, ValidationError, WireModel

__all__ = [
    "AppModelsFineTuningFineTuningJobCheckpoint",
    "Error",
    "FTCheckpointParameters",
    "FineTuningJob",
    "FineTuningJobEvent",
    "FineTuningJobListResponse",
    "FineTuningRequest",
    "HFCheckpointParametersRequestInput",
    "HFCheckpointParametersResponse",
    "HTTPValidationError",
    "HfExportConfigRequest",
    "HfExportConfigResponse",
    "HfExportIntegrationRequest",
    "HfExportIntegrationResponse",
    "Level",
    "ListCheckpointsResponse",
    "ListEventsResponse",
    "Metrics",
    "MlflowConfigRequest",
    "MlflowConfigResponse",
    "MlflowIntegrationRequest",
    "MlflowIntegrationResponse",
    "OpenaiTypesFineTuningJobsFineTuningJobCheckpointFineTuningJobCheckpoint",
    "SpecDraftConfig",
    "SpecDraftHParameters",
    "SpecDraftLossParams",
    "SpecDraftMethodConfig",
    "Status",
    "Suffix",
    "Suffix1",
    "SupervisedConfig",
    "SupervisedHParameters",
    "SupervisedMethodConfig",
    "Type",
    "Type1",
    "ValidationError",
    "WandbConfigRequest",
    "WandbConfigResponse",
    "WandbIntegrationRequest",
    "WandbIntegrationResponse",
]

_FirstThatFits = Field(union_mode="left_to_right")


class Suffix(RootModel[Annotated[str, Field(max_length=64)]]):
    """Text at the end of the new model's name."""


class Suffix1(RootModel[Annotated[str, Field(max_length=64)]]):
    """The same, in a request."""


class Status(Enum):
    validating_files = "validating_files"
    queued = "queued"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"


class Level(Enum):
    info = "info"
    warn = "warn"
    error = "error"


class Type(Enum):
    """Kind of an event."""

    message = "message"
    metrics = "metrics"


class Type1(Enum):
    """Loss of a draft model."""

    kl = "kl"
    lk_alpha = "lk_alpha"
    lk_hybrid = "lk_hybrid"


class Error(WireModel):
    code: str
    message: str
    param: str | None = None


class FTCheckpointParameters(WireModel):
    type: Literal["ft"] = "ft"


class HFCheckpointParametersRequestInput(WireModel):
    type: Literal["hf"] = "hf"
    repo: str
    revision: str | None = None
    token: SecretStr | None = None


class HFCheckpointParametersResponse(WireModel):
    type: Literal["hf"] = "hf"
    repo: str
    revision: str | None = None


class Metrics(WireModel):
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None
    step: float | None = None
    train_loss: float | None = None
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None


class SupervisedHParameters(WireModel):
    batch_size: int = Field(default=8, ge=1, le=64)
    learning_rate: float = Field(default=1e-5, ge=0)
    n_epochs: int = Field(default=3, ge=1, le=20)
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    packing: bool = True
    max_grad_norm: float = Field(default=1.0, gt=0)
    context_length: int = Field(default=8192, ge=8192, le=131072)
    lora: bool = False
    lora_r: int = Field(default=8, ge=8, le=128)
    lora_alpha: int = Field(default=8, ge=8)
    lora_dropout: float = Field(default=0.0, ge=0, le=1)


class SpecDraftLossParams(WireModel):
    type: Annotated[Type1 | str, _FirstThatFits] = Type1.kl


class SpecDraftHParameters(WireModel):
    batch_size: int = Field(default=8, ge=1, le=64)
    learning_rate: float = Field(default=0.0075, gt=0, lt=1)
    n_epochs: int = Field(default=1, ge=1, le=20)
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    packing: bool = True
    max_grad_norm: float = Field(default=1.0, gt=0)
    context_length: int = Field(default=8192, ge=8192, le=131072)
    architecture: str = "eagle3_original"
    num_decoding_heads: int = Field(default=3, ge=1, le=10)
    loss: SpecDraftLossParams | None = None


class SupervisedConfig(WireModel):
    hyperparameters: SupervisedHParameters


class SpecDraftConfig(WireModel):
    hyperparameters: SpecDraftHParameters


class SupervisedMethodConfig(WireModel):
    type: Literal["supervised"] = "supervised"
    supervised: SupervisedConfig


class SpecDraftMethodConfig(WireModel):
    type: Literal["spec-draft"] = "spec-draft"
    spec_draft: SpecDraftConfig


class WandbConfigRequest(WireModel):
    project: str
    name: str | None = None
    entity: str | None = None
    tags: list[str] | None = None
    api_key: SecretStr


class WandbConfigResponse(WireModel):
    project: str
    name: str | None = None
    entity: str | None = None
    tags: list[str] | None = None


class MlflowConfigRequest(WireModel):
    """`experiment_name` and `run_name` must be given but may be null."""

    tracking_uri: str
    experiment_name: str | None
    run_name: str | None
    tags: dict[str, str] | None = None
    certificate_file: str
    certificate_file_id: str | None = None
    username: str
    password: SecretStr


class MlflowConfigResponse(WireModel):
    tracking_uri: str
    experiment_name: str | None = None
    run_name: str | None = None
    tags: dict[str, str] | None = None
    certificate_file_id: str | None = None


class HfExportConfigRequest(WireModel):
    output_repo_name: str
    api_token: SecretStr


class HfExportConfigResponse(WireModel):
    output_repo_name: str


class WandbIntegrationRequest(WireModel):
    type: Literal["wandb"] = "wandb"
    wandb: WandbConfigRequest


class WandbIntegrationResponse(WireModel):
    type: Literal["wandb"] = "wandb"
    wandb: WandbConfigResponse


class MlflowIntegrationRequest(WireModel):
    type: Literal["mlflow"] = "mlflow"
    mlflow: MlflowConfigRequest


class MlflowIntegrationResponse(WireModel):
    type: Literal["mlflow"] = "mlflow"
    mlflow: MlflowConfigResponse


class HfExportIntegrationRequest(WireModel):
    type: Literal["hf"] = "hf"
    hf: HfExportConfigRequest


class HfExportIntegrationResponse(WireModel):
    type: Literal["hf"] = "hf"
    hf: HfExportConfigResponse


# A plain dictionary comes last: methods and settings that only the server knows travel as they are.
Method = Annotated[SupervisedMethodConfig | SpecDraftMethodConfig | dict[str, Any], _FirstThatFits]
HParameters = Annotated[SupervisedHParameters | dict[str, Any], _FirstThatFits]
IntegrationRequest = WandbIntegrationRequest | MlflowIntegrationRequest | HfExportIntegrationRequest
IntegrationResponse = Annotated[
    WandbIntegrationResponse | MlflowIntegrationResponse | HfExportIntegrationResponse | dict[str, Any], _FirstThatFits
]
CheckpointRequest = HFCheckpointParametersRequestInput | FTCheckpointParameters
CheckpointResponse = Annotated[HFCheckpointParametersResponse | FTCheckpointParameters | dict[str, Any], _FirstThatFits]


class FineTuningRequest(WireModel):
    model: str
    training_file: str
    validation_file: str | None = None
    from_checkpoint: CheckpointRequest | None = None
    hyperparameters: HParameters | None = None
    method: Method | None = None
    integrations: list[IntegrationRequest] | None = None
    seed: int | None = None
    suffix: Suffix1 | None = None
    tags: list[str] | None = None
    extra_body: dict[str, Any] | None = None


class FineTuningJob(WireModel):
    id: str
    created_at: int
    model: str
    status: Annotated[Status | str, _FirstThatFits]
    training_file: str
    object: str = "fine_tuning.job"
    error: Error | None = None
    finished_at: int | None = None
    hyperparameters: HParameters | None = None
    method: Method | None = None
    integrations: list[IntegrationResponse] | None = None
    from_checkpoint: CheckpointResponse | None = None
    organization_id: str = ""
    result_files: list[str] = Field(default_factory=list)
    seed: int = 0
    suffix: Suffix | None = None
    trained_tokens: int | None = None
    validation_file: str | None = None
    estimated_finish: int | None = None
    trained_steps: int | None = None
    total_steps: int | None = None


class FineTuningJobListResponse(WireModel):
    object: str = "list"
    data: list[FineTuningJob]
    has_more: bool


class FineTuningJobEvent(WireModel):
    id: str
    created_at: int
    level: Annotated[Level | str, _FirstThatFits]
    message: str
    object: str
    data: Any = None
    type: Annotated[Type | str, _FirstThatFits] | None = None


class ListEventsResponse(WireModel):
    object: str = "list"
    data: list[FineTuningJobEvent]
    has_more: bool = False


class OpenaiTypesFineTuningJobsFineTuningJobCheckpointFineTuningJobCheckpoint(WireModel):
    """One checkpoint, asked for by its id."""

    id: str
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: Metrics
    object: str
    step_number: int


class AppModelsFineTuningFineTuningJobCheckpoint(
    OpenaiTypesFineTuningJobsFineTuningJobCheckpointFineTuningJobCheckpoint
):
    """One checkpoint of a list; a server that does not send `result_files` has none."""

    result_files: list[str] = Field(default_factory=list)


class ListCheckpointsResponse(WireModel):
    object: str = "list"
    data: list[AppModelsFineTuningFineTuningJobCheckpoint]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
