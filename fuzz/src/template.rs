//! A chat template and the conversation that it prints: the input is the template, a NUL, and
//! messages as JSON.

use std::sync::LazyLock;

use gemma4_runtime::text::{Chat, ChatTemplate, Messages, Tokenizer};

/// The tokenizer of the tests, whose control tokens all begin with `<`.
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = include_bytes!("../../runtime/tests/data/tokenizer.json");
    Tokenizer::from_bytes(json).expect("a tokenizer")
});

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let at = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (source, messages) = input.split_at(at);
    let Ok(source) = std::str::from_utf8(source) else { return };
    let Ok(template) = ChatTemplate::new(source, [("bos_token", "<bos>")]) else { return };
    let messages = String::from_utf8_lossy(messages.get(1..).unwrap_or_default());
    let messages = Messages::from_json(&messages).unwrap_or_else(|_| {
        let message = serde_json::json!({"role": "user", "content": messages});
        Messages { messages: vec![message], tools: Vec::new() }
    });
    let chat = Chat {
        messages: &messages.messages,
        tools: (!messages.tools.is_empty()).then_some(&messages.tools),
        enable_thinking: Some(false),
        add_generation_prompt: true,
    };
    let Ok(rendered) = template.render(&chat, &TOKENIZER) else { return };
    let Ok(ids) = TOKENIZER.encode_rendered(&rendered) else { return };
    let spelled = source.contains(['<', '"', '\'', '\\']) || source.contains("bos_token");
    let answered = messages.messages.iter().any(|message| message["role"] == "assistant");
    if !spelled && !answered {
        let control = ids.iter().find(|id| TOKENIZER.is_control(**id));
        assert_eq!(control, None, "a message gave a control token");
    }
}
