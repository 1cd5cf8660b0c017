//! Whether config.json speaks of a model that this exporter knows, in weights that it can read.

use serde_json::Value;

use super::Refusal;

/// Model types and architectures of Gemma 4, with and without its towers.
const MODEL_TYPES: [&str; 2] = ["gemma4", "gemma4_text"];
const ARCHITECTURES: [&str; 2] = ["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"];

/// Refuses other models by name.
pub(super) fn check_architecture(config: &Value) -> Result<(), Refusal> {
    let model_type = config["model_type"].as_str();
    let architectures: Vec<&str> = config["architectures"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let known_type = model_type.is_some_and(|name| MODEL_TYPES.contains(&name));
    let known_architecture =
        architectures.is_empty() || architectures.iter().any(|name| ARCHITECTURES.contains(name));
    if known_type && known_architecture {
        return Ok(());
    }
    let mut found = match model_type {
        Some(name) => format!("a model of type `{name}`"),
        None => "a model without a `model_type`".to_owned(),
    };
    if !architectures.is_empty() {
        found += &format!(" ({})", architectures.join(", "));
    }
    Err(Refusal::Architecture { found })
}

/// The method by which the weights are quantized, if the config says that they are.
///
/// Checkpoints from quantization-aware training have such an entry too while their tensors are
/// bf16, so it counts only together with a tensor that is not.
pub(super) fn quantization(config: &Value) -> Option<String> {
    let entry = ["quantization_config", "compression_config"]
        .iter()
        .flat_map(|key| [&config[*key], &config["text_config"][*key]])
        .find(|entry| entry.is_object())?;
    Some(entry["quant_method"].as_str().unwrap_or("an unnamed method").to_owned())
}
