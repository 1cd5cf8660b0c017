//! The bundled INT4 model: answers, and logits against candle on the dequantized weights.

use gemma4_exporter::model::Config;
use gemma4_exporter::tiny::reference;
use gemma4_runtime::SessionOptions;

use super::fixtures::{argmax, exported, ids, json, max_difference, session, tiny_chat};

#[test]
fn at_least_58_of_60_answers_are_those_of_the_float32_model() {
    let golden = json("fixtures/golden/tiny-chat/golden.json");
    let program = exported(&tiny_chat(), 512);
    let stops = &program.program().text.stop_tokens;
    let mut session = session(&program, SessionOptions::default());
    let chats = golden["chat"].as_array().unwrap();
    assert_eq!(chats.len(), 60);
    let mut right = 0;
    for chat in chats {
        session.reset();
        session.prefill(&ids(&chat["prompt_ids"])).unwrap();
        let mut answer = Vec::new();
        while answer.len() < 64 {
            let token = argmax(&session.logits().unwrap());
            answer.push(token);
            if stops.contains(&token) {
                break;
            }
            session.decode(token).unwrap();
        }
        right += usize::from(answer == ids(&chat["output_ids"]));
    }
    assert!(right >= 58, "{right} of 60");
}

/// Teacher-forced over 400 tokens, three times past the window of 128.
#[test]
fn cpu_agrees_with_candle_on_the_dequantized_weights() {
    let golden = json("fixtures/golden/tiny-chat/golden.json");
    let text = &golden["text"][0];
    let tokens = [ids(&text["prompt_ids"]), ids(&text["output_ids"])].concat();
    assert!(tokens.len() > 400);
    let checkpoint = tiny_chat();
    let config = Config::parse(checkpoint.config_json()).unwrap();
    let program = exported(&checkpoint, 512);
    let expected = reference(&config, &program, tokens.len() as u32)
        .unwrap()
        .run(&tokens, 0)
        .unwrap()
        .logits
        .to_vec2::<f32>()
        .unwrap();
    let mut session = session(&program, SessionOptions::default());
    for (position, (token, expected)) in tokens.iter().zip(&expected).enumerate() {
        session.decode(*token).unwrap();
        let worst = max_difference(&session.logits().unwrap(), expected);
        assert!(worst <= 1e-3, "position {position}: off by {worst}");
    }
}
